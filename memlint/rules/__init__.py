"""The rules, one file each; `memlint.lint.catalog` finds them."""
