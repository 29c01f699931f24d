"""Finds the rules: every module of `memlint.rules` that is named after a code holds exactly one."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re

import memlint.rules
from memlint.rules.base import Rule

_MODULE = re.compile(r"ml\d{3}_")


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """All rules, ordered by code."""
    rules = []
    for info in pkgutil.iter_modules(memlint.rules.__path__):
        if _MODULE.match(info.name):
            module = importlib.import_module(f"memlint.rules.{info.name}")
            own = [
                item
                for item in vars(module).values()
                if isinstance(item, type) and issubclass(item, Rule) and item.__module__ == module.__name__
            ]
            rules += [cls() for cls in own]
    return tuple(sorted(rules, key=lambda rule: rule.code))
