"""Every private or undocumented member of another package that the product uses, so that an upgrade that changes one
is noticed here, by its name, and not in the middle of a run.

A use that is not in the tables fails too: add it with its home and its parameters, or use something documented.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
from collections.abc import Iterator
from importlib import resources
from operator import attrgetter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipeline.data_plane.transfer_queue import environment
from tests.contract.foreign import CLIENT, CONTROLLER, MANAGER, MESSAGE, META, POOL, SERVER, UNIT, product, uses

FIELD = "a field"  # a value, a property, or an attribute that the class sets on itself
KIND = "a class"  # an enumeration or an exception
NATIVE = "a native function"  # whose parameters cannot be read
TABLE = {  # home -> member -> its parameters; `=` marks those with a default
    CLIENT: {
        "": "client_id, controller_info, zmq_io_threads=, zmq_max_sockets=",
        "_controller": FIELD,
        "_request_controller": "self, socket, request_type, response_type, body",
        "async_clear_partition": "self, partition_id",
        "async_kv_list": "self, partition_id=, socket=",
        "async_kv_retrieve_keys": "self, global_indexes, partition_id, socket=",
        "async_kv_retrieve_meta": "self, keys, partition_id, create=, socket=",
        "close": "self",
        "controller_rpc_pool": FIELD,
        "initialize_storage_manager": "self, manager_type, config",
        "storage_manager": FIELD,
    },
    MANAGER: {
        "_get_from_single_storage_unit": "self, global_indexes, fields, target_storage_unit, socket=",
        "_group_by_hash": "self, global_indexes",
        "_put_to_single_storage_unit": "self, global_indexes, storage_data, target_storage_unit, data_parser=, socket=",
        "_request_with_retry": "self, operation, target_storage_unit, request_context, make_request, max_attempts=",
        "_select_by_positions": "field_data, positions",
        "clear_data": "self, metadata",
    },
    CONTROLLER: {
        "_handle_request": "self, request_msg, monitor",
        "clear_meta": "self, global_indexes, partition_ids, clear_consumption=",
        "get_production_status": "self, partition_id, data_fields",
        "kv_retrieve_meta": "self, keys, partition_id, create=",
        "mark_clearing": "self, global_indexes, partition_ids",
        "update_production_status": "self, partition_id, global_indexes, field_schema, custom_backend_meta=",
    },
    UNIT: {"_handle_get": "self, data_parts", "_handle_put": "self, data_parts"},
    META: {
        "": "global_indexes, partition_ids, field_schema=, production_status=, extra_info=, custom_meta=, "
        "_custom_backend_meta=",
        "field_schema": FIELD,
        "global_indexes": FIELD,
    },
    MESSAGE: {
        "": "request_type, sender_id, receiver_id, body, request_id, timestamp",
        "body": FIELD,
        "deserialize": "frames",
        "serialize": "self",
    },
    POOL: {"alease": "self, peer"},
    SERVER: {"": "role, id, ip, ports", "id": FIELD, "ip": FIELD, "ports": FIELD},
    "transfer_queue.utils.zmq_utils:ZMQRequestType": {
        "": KIND, "KV_RETRIEVE_META": FIELD
    },
    "transfer_queue.utils.zmq_utils:ZMQMessageDecodeError": {"": KIND},
    "transfer_queue.utils.serial_utils:_PICKLE_FALLBACK_SENTINEL": {"": FIELD},
    "transfer_queue.interface:TransferQueueController": {"__ray_metadata__": FIELD},
    "transfer_queue.storage.bootstrap.simple_storage_bootstrap:SimpleStorageUnit": {"__ray_metadata__": FIELD},
    "transfer_queue:interface": {"": FIELD, "ray": FIELD},
    "transfer_queue.storage.bootstrap:simple_storage_bootstrap": {"": FIELD},
    "transfer_queue.utils.enum_utils:Role": {"": KIND, "CONTROLLER": FIELD, "STORAGE": FIELD},
    "transfer_queue.utils.zmq_utils:get_node_ip_address": {"": ""},
    "transfer_queue.utils:common": {"": FIELD, "psutil": FIELD},
    "transfer_queue.storage.managers.simple_storage_manager:StorageUnitTimeout": {"": KIND},
    "transfer_queue:StorageKeyNotFoundError": {"": KIND},
    "transfer_queue:init": {"": "conf="},
    "transfer_queue:close": {"": ""},
    "transfer_queue:get_client": {"": ""},
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer": {
        "_sample_draft_tokens": "self, hidden_states, sampling_metadata"
    },
    "vllm.lora.worker_manager:WorkerLoRAManager": {"_adapter_manager": FIELD},
    "vllm.v1.attention.backend:AttentionLayer": {
        "_k_scale": FIELD, "_k_scale_cpu": FIELD, "_k_scale_float": FIELD, "_q_scale": FIELD, "_q_scale_float": FIELD,
        "_v_scale": FIELD, "_v_scale_cpu": FIELD, "_v_scale_float": FIELD,
    },
    "vllm.v1.executor.uniproc_executor:get_distributed_init_method": {"": "ip, port"},
    "vllm.v1.executor.multiproc_executor:get_distributed_init_method": {"": "ip, port"},
    "torch:_foreach_copy_": {"": NATIVE},
    "torch:UntypedStorage": {"_new_shared_cuda": NATIVE, "_share_cuda_": NATIVE},
    "torch.distributed:ProcessGroup": {"_get_backend": NATIVE},
    "torch.distributed:ProcessGroupGloo": {"_Options": NATIVE},
    "torch.distributed:ProcessGroupGloo._Options": {"_devices": FIELD, "_timeout": FIELD},
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset": {
        "": "global_shape, mesh, placements, skip_offset="
    },
    "torch.nn:Module": {"_parameters": FIELD},
    "torch.utils._python_dispatch:TorchDispatchMode": {"": "_dispatch_key="},
    "transformers:PreTrainedModel": {"_no_split_modules": FIELD},
    "ray._private.state:available_resources_per_node": {"": ""},
    "ray._private:worker": {"": FIELD, "print_to_stdstream": "data, ignore_prefix"},
    "argparse:ArgumentParser": {"_option_string_actions": FIELD},
    "argparse:HelpFormatter": {
        "_format_action": "self, action",
        "_format_action_invocation": "self, action",
        "_split_lines": "self, text, width",
    },
    "sys:_getframe": {"": "depth="},
    "sys:_current_frames": {"": ""},
}  # fmt: skip
KEYWORDS = {  # private names of parameters and keys, and the function that takes them
    "_node_ip_address": "ray:init",
    "_temp_dir": "ray:init",
    "_timestamp": "wandb.sdk.interface.interface:InterfaceBase.publish_partial_history",
}
DOCUMENTED = {"._exit", "._replace"}  # of os, and of a NamedTuple


def listed() -> dict[str, str]:
    """Return the homes of all members in the tables, by the names that `uses` has for them."""
    found = {f'"{name}"': name for name in KEYWORDS}
    for home, members in TABLE.items():
        for member in members:
            whole = f"{home}.{member}".removesuffix(".")
            private = member or home.partition(":")[2]
            found[whole] = whole
            if private.startswith("_"):
                found[f".{private}"] = whole
    return found


def changed() -> Iterator[str]:
    """Yield what is no longer as the table says, with its name. Packages that are not installed are left out."""
    for home, members in TABLE.items():
        if importlib.util.find_spec(home.partition(":")[0].partition(".")[0]) is None:
            continue
        for member, parameters in members.items():
            whole = f"{home}.{member}".removesuffix(".")
            if (now := shape(whole)) != parameters:
                yield f"{whole} was ({parameters}) and is {'gone' if now is None else f'({now})'}"


def shape(home: str) -> str | None:
    """Return the parameters of a member, or FIELD, KIND or NATIVE; None if it is gone."""
    module, _, path = home.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for name in path.split("."):
        if isinstance(found, type) and not hasattr(found, name):
            return FIELD if _sets(found, name) else None
        if not hasattr(found, name):
            return None
        found = getattr(found, name)
    return _parameters(found)


def _parameters(found: object) -> str:
    if isinstance(found, type) and issubclass(found, enum.Enum | BaseException):
        return KIND
    if not callable(found) or isinstance(found, enum.Enum):
        return FIELD
    try:
        named = inspect.signature(found).parameters.values()
    except ValueError:
        return NATIVE
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words = [f"{marks.get(each.kind, '')}{each.name}{'=' * (each.default is not each.empty)}" for each in named]
    return ", ".join(word for word in words if word != "_ray_trace_ctx=")  # Ray adds it to an actor's methods


def _sets(kind: type, name: str) -> bool:
    """Return whether a class declares an attribute, or sets it on its instances."""
    if any(name in vars(base).get("__annotations__", {}) for base in kind.__mro__):
        return True
    texts = (inspect.getsource(base) for base in kind.__mro__ if base.__module__ != "builtins")
    return any(re.search(rf"\bself\.{name}\b\s*(:.*)?=(?!=)", text) for text in texts)


def test_every_member_of_another_package_is_in_the_tables():
    texts = product()
    found, known = uses(texts), listed()
    new = [f"{use} in {', '.join(sorted(found[use]))}" for use in sorted(found.keys() - known.keys() - DOCUMENTED)]
    assert not new, "private or undocumented, and not in the tables:\n" + "\n".join(new)
    words = {word for text in texts.values() for word in re.findall(r"\w+", text)}
    unused = [use for use in known if re.findall(r"\w+", use)[-1] not in words]
    assert not unused, "in the tables, and not used any more:\n" + "\n".join(unused)


def test_they_are_as_the_product_expects():
    found = list(changed())
    assert not found, "an upgrade has changed what the product relies on:\n" + "\n".join(found)
    for keyword, home in KEYWORDS.items():
        module, _, path = home.partition(":")
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            source = inspect.getsource(attrgetter(path)(importlib.import_module(module)))
            assert f'"{keyword}"' in source, f"{home} does not take {keyword}"


def test_transfer_queue_reads_the_settings():
    """Environment variables, and keys of its configuration. It ignores what it does not know."""
    with resources.as_file(resources.files("transfer_queue")) as folder:
        text = "\n".join(path.read_text() for path in Path(folder).rglob("*.py"))
        config = OmegaConf.load(folder / "config.yaml")
    assert [name for name in environment(1.0) if f'"{name}"' not in text] == []
    assert {"polling_mode", "zmq_info"} <= config.controller.keys()
    assert {"num_data_storage_units", "required_node_resource", "zmq_info"} <= config.backend.SimpleStorage.keys()
    assert '"put_get_socket"' in text and '"request_handle_socket"' in text


USES = """
import ray._private
from ray._private.worker import connect
from torch import _C
from transfer_queue.client import Fresh

def use(self, client, group):
    ray.init(_temp_dir="x")
    getattr(client, "_hidden")
    return self._client.kv_new, self._inherited, client._foreign, group.options["_key"], self._foreign_too

class Ours:
    _own = 1

    def __init__(self, other):
        self._inherited, self._client = other._own, other
"""


def test_a_new_use_is_found():
    file = "pipeline/data_plane/wire.py"
    known = uses({file: USES, "ops/other.py": "class Base:\n    def _base(self):\n        return self._base\n"})
    assert known.keys() == {
        "ray._private:", "ray._private.worker:connect", "torch:_C", "transfer_queue.client:Fresh", '"_temp_dir"',
        '"_hidden"', '"_key"', f"{CLIENT}.kv_new", f"{CLIENT}._foreign", "._foreign_too",
    }  # fmt: skip


@pytest.mark.parametrize("change", ["parameters", "removed"])
def test_a_changed_member_is_named(monkeypatch: pytest.MonkeyPatch, change: str):
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

    if change == "removed":
        monkeypatch.delattr(AsyncSimpleStorageManager, "_group_by_hash")
    else:
        monkeypatch.setattr(AsyncSimpleStorageManager, "_group_by_hash", lambda self, indexes: {})
    now = "gone" if change == "removed" else "(self, indexes)"
    assert list(changed()) == [f"{MANAGER}._group_by_hash was (self, global_indexes) and is {now}"]
