"""Optional parts of the suite: skipped with a reason where they are not installed, unless SLUICE_REQUIRE names them.

    trl = need("trl", "trl")

SLUICE_REQUIRE is a list of parts with commas, such as `web,vllm,megatron,gpu`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import NoReturn

import pytest


def need(part: str, module: str) -> ModuleType:
    """The module, imported. Without it the test is skipped, or fails where SLUICE_REQUIRE names the part."""
    if importlib.util.find_spec(module) is None:
        required(part, module)
    return importlib.import_module(module)


def required(part: str, module: str) -> NoReturn:
    """What becomes of a test that lacks a package."""
    lacking(part, f"the optional part {part!r} needs the package {module!r}, which is not installed")


def lacking(part: str, reason: str) -> NoReturn:
    """What becomes of a test that lacks something."""
    if part in {name.strip() for name in os.environ.get("SLUICE_REQUIRE", "").split(",")}:
        pytest.fail(f"{reason}; SLUICE_REQUIRE names it")
    pytest.skip(reason)
