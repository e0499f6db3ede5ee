"""Optional test dependencies: tests are skipped with a reason if one is missing, unless SLUICE_REQUIRE names it.

    trl = need("trl", "trl")

SLUICE_REQUIRE is a comma-separated list of parts, such as `web,vllm,megatron,gpu,hosts`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import NoReturn

import pytest
from packaging.version import Version


def need(part: str, module: str) -> ModuleType:
    """Import and return the module. If it is missing, skip the test, or fail it if SLUICE_REQUIRE names the part."""
    if importlib.util.find_spec(module) is None:
        required(part, module)
    return importlib.import_module(module)


def required(part: str, module: str) -> NoReturn:
    """Skip or fail a test that lacks a package."""
    lacking(part, f"the optional part {part!r} needs the package {module!r}, which is not installed")


def lacking(part: str, reason: str) -> NoReturn:
    """Skip a test that lacks something, or fail it if SLUICE_REQUIRE names the part."""
    if part in {name.strip() for name in os.environ.get("SLUICE_REQUIRE", "").split(",")}:
        pytest.fail(f"{reason}; SLUICE_REQUIRE names it")
    pytest.skip(reason, allow_module_level=True)


def since_vllm(version: str, part: str) -> None:
    """Skip a test of something that an older vLLM cannot do."""
    if Version(need("vllm", "vllm").__version__.partition("+")[0]) < Version(version):
        lacking(part, f"{part} needs vLLM {version}")
