"""Reports of the runtime half: `record` makes plain data of an outcome, everything else prints that data."""
