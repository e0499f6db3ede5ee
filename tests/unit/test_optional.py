"""Tests of a missing optional package are skipped with a reason, or fail if SLUICE_REQUIRE names it."""

import json

import pytest

from tests.optional import need


def test_a_part_that_is_there_is_imported(monkeypatch):
    monkeypatch.setenv("SLUICE_REQUIRE", "json")
    assert need("json", "json") is json


def test_a_missing_part_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setenv("SLUICE_REQUIRE", "web, vllm")
    with pytest.raises(pytest.skip.Exception, match="'megatron' needs the package 'no_such_package'"):
        need("megatron", "no_such_package")


def test_a_missing_part_fails_where_it_is_required(monkeypatch):
    monkeypatch.setenv("SLUICE_REQUIRE", "web, megatron")
    with pytest.raises(pytest.fail.Exception, match="SLUICE_REQUIRE names it"):
        need("megatron", "no_such_package")
