"""The runtime half: training steps held to a peak, growth across steps, and who holds what leaks.

What is where: `budget` what a test asks for; `backends` what a device says; `series` the steps and the statistics of
growth; `tracker` counts the storages behind tensors; `trace` remembers where each was made; `heap` and `attribution`
say who holds what survived; `session` runs steps and judges them; `plugin` (pytest), `monitor` (a loop of your own) and
`script` (`memlint run`) are its three users; `report` prints, `baseline` compares with an earlier run.

torch is imported when the first step is measured, not when pytest starts.
"""
