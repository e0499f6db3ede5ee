"""Invalid worker groups, models and batch divisions that a check finds."""

import json
import math
from collections.abc import Mapping, Sequence

from graphs.quickstart import TINY_QWEN3
from tests.errors.harness import Case

NO_GROUPS: Mapping[str, str] = {}
NO_SHAPES: Mapping[str, Sequence[int]] = {}
IMPORT = "from stages import ClippedLoss, Dynamic, Packed, Supervised, TruncatedIS\n\n\n"
ENDS = """from ops.refit.transports import Receiver, Sender, Transport


class Reads(Receiver):
    def receive(self, meeting, shares, version):
        return {}


class Sends(Sender):
    def __init__(self, transport=None):
        pass

    def send(self, meeting, version):
        return {}


"""
SHARDED = """from pipeline.declare.sharding import Packed, Sharding


@dataclass(frozen=True)
class Lengths(Stage):
    name: str = "lengths"
    reads: tuple = ()
    per: str = "group"
    sharding: Sharding = Sharding.of(Packed(64))
    setup = lambda *_: dict

"""


def weights(
    shapes: Mapping[str, Sequence[int]] = NO_SHAPES, lacks: int = 0, dtype: str = "U8"
) -> dict[str, str | bytes]:
    """Return a safetensors file in the folder m, of bytes of these shapes, without some bytes at its end."""
    header, size = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + math.prod(shape)]}
        size += math.prod(shape)
    text = json.dumps(header).encode()
    return {"m/model.safetensors": len(text).to_bytes(8, "little") + text + bytes(size - lacks)}


def learner(name: str, parameters: str, at: tuple[str, ...] = ("learner",), **lines: str) -> Case:
    """Return a case of the learner's worker group."""
    made = {"learner": f'WorkerGroup("learner", backend="torch", {parameters})'}
    return Case(name, made | lines, at=at, top=IMPORT)


PACKED = {
    "prev": "PrevLogprobs(policy, on=learner, microbatch=Packed(64))",
    "train": "Train(policy, on=learner, lr=1e-3, microbatch=Packed(64))",
}


def megatron(name: str, parameters: str, at: tuple[str, ...] = ("learner",), **lines: str) -> Case:
    """Return a case of a learner with Megatron-core and packed rows."""
    made = {"learner": f'WorkerGroup("learner", backend="megatron", {parameters})'}
    return Case(name, made | PACKED | lines, at=at, top=IMPORT)


def refit(name: str, transport: str, groups: Mapping[str, str] = NO_GROUPS) -> Case:
    """Return a case of a weight transport between these worker groups."""
    stage = f"Refit(policy, source=learner, target=sampler, transport={transport!r})"
    return Case(name, {**groups, "refit": stage}, at=("refit",), top=IMPORT)


def own(case: str, transport: str, /, top: str = "", groups: Mapping[str, str] = NO_GROUPS, **parts: str) -> Case:
    """Return a case of a user's own transport, with some parts replaced."""
    stage = f"Refit(policy, source=learner, target=sampler, transport={transport})"
    given = {"name": "'own'", "sender": "lambda self: Sender()", "receiver": "lambda self: Reads()", **parts}
    lines = "".join(f"    {part} = {value}\n" for part, value in given.items())
    described = top or f"{ENDS}class Own(Transport):\n{lines}"
    return Case(case, {**groups, "refit": stage}, at=("refit",), top=f"{IMPORT}{described}\n\n\n")


def model(name: str, parameters: str) -> Case:
    """Return a case of the policy."""
    return Case(name, {"policy": f"Model({parameters})"}, top=IMPORT)


SHAPED = f"Model('tiny', config={TINY_QWEN3!r}, alphabet=task.alphabet)"
QWEN3_TINY = "'tiny', config={'model_type': 'qwen3'}, alphabet=task.alphabet"
MIXTURE = f"Model({QWEN3_TINY.replace('qwen3', 'qwen3_moe')}, router_replay=True)"
UNFIT = {
    "model_type": "deepseek_v3", "num_experts_per_tok": 8, "n_routed_experts": 4, "n_group": 3, "topk_group": 4,
    "head_dim": 64, "qk_rope_head_dim": 32,
}  # fmt: skip
UNFIT_MAMBA = {"model_type": "nemotron_h", "layers_block_type": ["mamba"], "mamba_num_heads": 4, "n_groups": 3}
REFUSED = {"model_type": "glm4_moe", "n_shared_experts": None, "routed_scaling_factor": 1}
DIFFERING = TINY_QWEN3 | {"attention_bias": True, "partial_rotary_factor": 0.5, "hidden_act": "gelu"}
UNLIKE = TINY_QWEN3 | {  # layers of experts in whole blocks, and one without
    "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 4, "moe_intermediate_size": 128, "mlp_only_layers": [0],
    "intermediate_size": 200,
}  # fmt: skip
WIDER = SHAPED.replace("task.", "'a' + task.")  # one more token

GROUPS = [
    learner("tensor_parallel_does_not_divide", "workers=3, tensor_parallel=2"),
    learner("tensor_parallel_of_torch", "workers=2, tensor_parallel=2"),
    learner("expert_parallel_of_torch", "workers=2, expert_parallel=2"),
    learner("tensor_parallel_of_0", "tensor_parallel=0"),
    learner("expert_parallel_does_not_divide", "workers=2, expert_parallel=3"),
    learner("expert_tensor_parallel_does_not_divide", "expert_tensor_parallel=2"),
    learner(
        "experts_over_parts_of_two_replicas",
        "workers=12, tensor_parallel=4, expert_parallel=3, expert_tensor_parallel=2",
    ),
    learner(
        "experts_over_parts_of_two_sliced_replicas",
        "workers=12, context_parallel=4, expert_parallel=6",
    ),
    learner("expert_tensor_parallel_of_0", "expert_tensor_parallel=0"),
    megatron("context_parallel_on_cpus", "workers=2, context_parallel=2"),
    megatron(
        "context_parallel_without_transformer_engine",
        "gpus=2, context_parallel=2",
        sampler='WorkerGroup("sampler", backend="torch", gpus=1)',
    ),
    megatron(
        "context_parallel_of_padded_rows",
        "workers=2, context_parallel=2",
        at=("learner", "prev", "train"),
        prev="PrevLogprobs(policy, on=learner)",
        train="Train(policy, on=learner, lr=1e-3, microbatch=Dynamic(64))",
    ),
    megatron("more_pipeline_stages_than_layers", "workers=4, pipeline_parallel=4", policy=SHAPED),
    megatron("heads_that_ranks_do_not_divide", "workers=3, tensor_parallel=3", policy=SHAPED),
    megatron("experts_of_a_dense_model", "workers=2, expert_parallel=2", policy=SHAPED),
    megatron(
        "a_family_that_megatron_does_not_build",
        "",
        policy='Model("tiny", config={"model_type": "gemma"}, alphabet=task.alphabet)',
    ),
    Case(
        "heads_that_vllm_does_not_divide",
        {"policy": SHAPED, "sampler": 'WorkerGroup("sampler", backend="vllm", workers=3, tensor_parallel=3)'},
        at=("sampler",),
        top=IMPORT,
    ),
    Case(
        "heads_that_do_not_fit",
        {"policy": SHAPED.replace("'num_key_value_heads': 4", "'num_key_value_heads': 3")},
        at=("policy",),
        top=IMPORT,
    ),
    model("experts_and_heads_that_do_not_fit", f"'tiny', config={UNFIT!r}, alphabet=task.alphabet"),
    model("settings_that_transformers_refuses", f"'tiny', config={REFUSED!r}, alphabet=task.alphabet"),
    model("mamba_groups_that_do_not_fit", f"'tiny', config={UNFIT_MAMBA!r}, alphabet=task.alphabet"),
    model("latents_of_no_size", f"'tiny', config={UNFIT | {'kv_lora_rank': 0}!r}, alphabet=task.alphabet"),
    Case(
        "an_inner_size_that_vllm_does_not_divide",
        {
            "policy": SHAPED.replace("'intermediate_size': 128", "'intermediate_size': 126"),
            "sampler": 'WorkerGroup("sampler", backend="vllm", workers=4, tensor_parallel=4)',
        },
        at=("sampler",),
        top=IMPORT,
    ),
    learner("fetch_by_a_leader_of_none", "workers=2, fetch='leader'"),
    learner("unknown_fetch", "workers=2, fetch='all'"),
    learner("memory_in_percent", "memory=50"),
    learner("cache_of_integers", "cache='int4'"),
    learner("cache_of_a_trainer", "cache='fp8'"),
    learner("weights_of_integers", "weights='int4'"),
    learner("weights_of_a_trainer", "weights='fp8'"),
    Case(
        "weights_whose_blocks_vllm_would_cut",
        {
            "policy": SHAPED,
            "sampler": 'WorkerGroup("sampler", backend="vllm", gpus=2, tensor_parallel=2, weights="fp8")',
            "learner": 'WorkerGroup("learner", backend="torch", gpus=1)',
        },
        at=("sampler",),
        top=IMPORT,
    ),
    Case(
        "settings_that_vllm_computes_differently",
        {
            "policy": f"Model('tiny', config={DIFFERING!r}, alphabet=task.alphabet)",
            "sampler": 'WorkerGroup("sampler", backend="vllm")',
        },
        at=("sampler",),
        top=IMPORT,
    ),
    Case(
        "weights_whose_dense_layers_vllm_would_cut",
        {
            "policy": f"Model('tiny', config={UNLIKE!r}, alphabet=task.alphabet)",
            "sampler": 'WorkerGroup("sampler", backend="vllm", gpus=1, weights="fp8")',
            "learner": 'WorkerGroup("learner", backend="torch", gpus=1)',
        },
        at=("sampler",),
        top=IMPORT,
    ),
    Case(
        "a_cache_of_latents_in_8_bits",
        {
            "policy": SHAPED.replace("'model_type': 'qwen3'", "'model_type': 'deepseek_v3', 'kv_lora_rank': 32"),
            "sampler": 'WorkerGroup("sampler", backend="vllm", gpus=1, cache="fp8")',
            "learner": 'WorkerGroup("learner", backend="torch", gpus=1)',
        },
        at=("sampler",),
        top=IMPORT,
    ),
    learner("speculation_of_a_trainer", "speculate=4"),
    learner("speculation_of_half_a_token", "speculate=0.5"),
    Case(
        "a_draft_that_drafts_nothing",
        {"sampler": f'WorkerGroup("sampler", backend="vllm", draft={SHAPED})'},
        at=("sampler",),
        top=IMPORT,
    ),
    Case(
        "a_draft_that_is_a_folder",
        {"sampler": 'WorkerGroup("sampler", backend="vllm", speculate=4, draft="small")'},
        at=("sampler",),
    ),
    Case(
        "a_draft_of_another_vocabulary",
        {
            "policy": SHAPED,
            "sampler": f'WorkerGroup("sampler", backend="vllm", speculate=4, draft={WIDER})',
        },
        at=("sampler",),
        top=IMPORT,
    ),
    learner("fully_sharded_on_one_worker", "fully_sharded=True"),
    learner("fully_sharded_is_a_text", "workers=2, fully_sharded='fsdp'"),
    learner(
        "more_gpus_than_workers",
        "gpus=4, workers=2",
        sampler='WorkerGroup("sampler", backend="torch", gpus=1)',
    ),
    learner("learners_do_not_divide_the_batch", "workers=3"),
    learner("colocated_with_a_name", "colocated='sampler'"),
    learner("colocated_with_more_gpus", "gpus=2, workers=2, colocated=sampler"),
    learner("colocated_and_fully_sharded", "workers=2, fully_sharded=True, colocated=sampler"),
    learner("colocated_with_a_group_of_no_stage", "colocated=WorkerGroup('other', backend='torch')"),
    learner(
        "colocated_and_ahead",
        "colocated=sampler",
        schedule="Schedule(steps=2, max_staleness=1)",
        train="Train(policy, on=learner, lr=1e-3, loss=ClippedLoss(correction=TruncatedIS(cap=2.0)))",
    ),
    learner("group_parameter_of_another_library", "tp=2"),
    Case("group_without_a_name", {"learner": 'WorkerGroup(backend="torch")'}),
    Case("batch_of_fewer_groups_than_workers", {"learner": 'WorkerGroup("learner", backend="torch", workers=8)'}),
    learner(
        "workers_do_not_divide_a_minibatch",
        "workers=4",
        at=("train",),
        rollout="Rollout(policy, on=sampler, samples_per_prompt=3, max_tokens=3)",
        train="Train(policy, on=learner, lr=1e-3, minibatches=2)",
    ),
    learner(
        "minibatch_of_fewer_samples_than_workers",
        "workers=4",
        at=("train",),
        train="Train(policy, on=learner, lr=1e-3, minibatches=4, microbatch=Packed(64))",
    ),
    Case("sharding_of_a_stage_per_group", {"extra": "(Lengths(reads=rollout.writes[:2]),)"}, top=SHARDED),
    Case("sharding_without_lengths", {"extra": "(Lengths(reads=reward.writes, per='batch'),)"}, top=SHARDED),
    Case("logprobs_run_on_no_group", {"prev": "PrevLogprobs(policy)"}),
    Case("rollout_on_the_host", {"rollout": "Rollout(policy, samples_per_prompt=2, max_tokens=3)"}),
    Case(
        "two_stages_train_one_model",
        {"extra": "(Second(policy, on=learner, lr=1e-3),)"},
        top="class Second(Train):\n    name = 'second'\n    writes = ()\n\n\n",
    ),
]
ON_GPUS = {name: f'WorkerGroup("{name}", backend="torch", gpus=1)' for name in ("sampler", "learner")}
COLOCATED = {"learner": 'WorkerGroup("learner", backend="torch", gpus=1, colocated=sampler)'}
TRANSPORTS = [
    refit("unknown_transport", "nccl"),
    refit("misspelt_transport", "brodcast"),
    own("transport_is_a_class", "Own"),
    own("transport_is_a_class_with_parameters", "Sized", "class Sized:\n    def __init__(self, port, *, size): ..."),
    own("transport_without_a_sender", "Half()", "class Half:\n    name = 'half'\n    devices = ('cpu',)"),
    own("transport_with_the_name_of_another", "Own()", name="'pull'"),
    own("transport_without_a_name", "Own()", name="''"),
    own("transport_of_no_known_device", "Own()", devices="'gpu'"),
    own("transport_between_other_devices", "Own()", devices="('cuda',)"),
    own("transport_whose_sender_does_not_send", "Own()", both_carry="True"),
    own("transport_with_a_misspelt_part", "Own()", device="('cpu',)"),
    own("transport_whose_sender_is_misspelt", "Own()", sender="type('Sends', (Sender,), {'ofer': lambda *_: 1})"),
    own("transport_whose_receiver_fails", "Own()", receiver="lambda self: 1 / 0"),
    own("transport_is_a_number", "7"),
    own("own_transport_on_the_same_gpus", "Own()", groups=ON_GPUS | COLOCATED, both_carry="True", sender="Sends"),
    own("buckets_of_no_bytes", "Broadcast(bucket_bytes=0, buckets=True)", "from ops.refit.transports import Broadcast"),
    own("slots_given_as_a_text", "Gloo(slot_bytes='64 MiB')", "from ops.refit.transports import Gloo"),
    own("interface_given_as_a_text", "Gloo(interfaces='eth0')", "from ops.refit.transports import Gloo"),
    own("half_a_slot", "Tree(slots=0.5)", "from ops.refit.transports import Tree"),
    own("pull_without_a_copy", "Pull(keep_copy=False)", "from ops.refit.transports.listed import Pull"),
    own("own_transport_without_a_copy", "Own()", keep_copy="False"),
    own("copies_are_counted", "Gloo(keep_copy=2)", "from ops.refit.transports import Gloo"),
    refit("p2p_between_cpus", "p2p"),
    refit("gloo_between_gpus", "gloo", ON_GPUS),
    refit("broadcast_on_the_same_gpus", "broadcast", ON_GPUS | COLOCATED),
]
SAVED = TINY_QWEN3 | {"vocab_size": 16}
FOLDER = {"m/config.json": json.dumps(SAVED), "m/tokenizer.json": "{}"}
CODED = weights() | {
    "m/config.json": json.dumps(SAVED | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}),
    "m/tokenizer.json": "{}",
}
EIGHT_BIT = FOLDER | weights({"model.embed_tokens.weight": [16, 64], "model.norm.weight": [64]}, dtype="F8_E4M3")
OTHER_SIZES = {"model.embed_tokens.weight": [8, 64]}
SHAPELESS = json.dumps({name: value for name, value in SAVED.items() if not name.startswith(("hidden", "num"))})
MODELS = [
    model("model_of_no_type", '"tiny", config={"hidden_size": 64}, alphabet=task.alphabet'),
    model("model_of_no_alphabet", '"tiny", config={"model_type": "qwen3"}'),
    model("alphabet_names_a_character_twice", '"tiny", config={"model_type": "qwen3"}, alphabet="01234567891r>"'),
    model("alphabet_without_a_letter_of_the_task", '"tiny", config={"model_type": "qwen3"}, alphabet="0123456789"'),
    model("seed_of_20_digits", '"tiny", config={"model_type": "qwen3"}, alphabet=task.alphabet, seed=10**19'),
    Case("model_name_without_an_owner", {"policy": "Model('tiny_lama')"}),
    Case("model_folder_misspelled", {"policy": "Model('tiny_lama')"}, files={"tiny_llama/config.json": "{}"}),
    Case("model_folder_without_config", {"policy": "Model('m')"}, files={"m/weights": ""}),
    Case("model_folder_of_broken_config", {"policy": "Model('m')"}, files=CODED | {"m/config.json": "{"}),
    Case("model_folder_of_half_a_config", {"policy": "Model('m')"}, files=CODED | {"m/config.json": SHAPELESS}),
    Case("model_folder_of_a_config_alone", {"policy": "Model('m')"}, files={"m/config.json": json.dumps(SAVED)}),
    Case("model_folder_of_pickles", {"policy": "Model('m')"}, files=FOLDER | {"m/pytorch_model.bin": b""}),
    Case("model_folder_of_cut_weights", {"policy": "Model('m')"}, files=FOLDER | weights(OTHER_SIZES, lacks=12)),
    Case("model_folder_of_other_sizes", {"policy": "Model('m')"}, files=FOLDER | weights(OTHER_SIZES)),
    Case("model_folder_of_8_bits_without_quantization_config", {"policy": "Model('m')"}, files=EIGHT_BIT),
    Case(
        "model_folder_of_8_bits_without_scales",
        {"policy": "Model('m')"},
        files=EIGHT_BIT | {"m/config.json": json.dumps(SAVED | {"quantization_config": {"quant_method": "fp8"}})},
    ),
    Case(
        "model_folder_of_a_cut_tokenizer",
        {"policy": "Model('m')"},
        files=FOLDER | weights() | {"m/tokenizer.json": "{"},
    ),
    Case("model_folder_with_code", {"policy": "Model('m')"}, files=CODED),
    Case(
        "model_trusted_by_vllm",
        {"policy": "Model('m', trust_remote_code=True)", "sampler": 'WorkerGroup("sampler", backend="vllm")'},
        at=("policy",),
        files=CODED,
    ),
    Case("old_logprobs_of_another_model", {"prev": "PrevLogprobs(policy.frozen(), on=learner)"}),
    model("unknown_parameter_of_a_model", '"Qwen/Qwen3-0.6B", dtype="bfloat16"'),
    model("alphabet_is_a_list", '"tiny", config={"model_type": "qwen3"}, alphabet=["0", "1"]'),
    model("config_is_a_text", '"tiny", config="qwen3", alphabet=task.alphabet'),
    model("model_is_a_number", "7"),
    model("warm_start_is_a_number", '"tiny", config={"model_type": "qwen3"}, alphabet=task.alphabet, warm_start=60'),
    model(
        "warm_start_of_a_file",
        '"tiny", config={"model_type": "qwen3"}, alphabet=task.alphabet, warm_start=Supervised("sft.jsonl")',
    ),
    model(
        "warm_start_until_40",
        '"tiny", config={"model_type": "qwen3"}, alphabet=task.alphabet, warm_start=Supervised(task, until=40)',
    ),
    Case("model_folder_of_no_model", {"policy": 'Model("./last")'}, files={"last/optimizer.pt": b""}),
    model("replay_of_a_model_without_experts", f"{QWEN3_TINY}, router_replay=True"),
    model(
        "replay_of_a_mixture_of_dense_layers",
        "'tiny', config={'model_type': 'glm4_moe', 'num_hidden_layers': 3, 'first_k_dense_replace': 9}, "
        "alphabet=task.alphabet, router_replay=True",
    ),
    model("replay_is_a_number", f"{QWEN3_TINY}, router_replay=1"),
    Case(
        "replay_with_vllm_on_a_cpu",
        {"policy": MIXTURE, "sampler": 'WorkerGroup("sampler", backend="vllm")'},
        at=("policy",),
    ),
    Case(
        "replay_with_drafts",
        {
            "policy": MIXTURE,
            "sampler": 'WorkerGroup("sampler", backend="vllm", gpus=1, speculate=2)',
            "learner": 'WorkerGroup("learner", backend="torch", gpus=1)',
        },
        at=("policy",),
    ),
    Case(
        "replay_of_a_rollout_of_another_model",
        {"policy": MIXTURE, "rollout": "Rollout(policy.frozen(), on=sampler, samples_per_prompt=2, max_tokens=3)"},
        at=("prev",),
    ),
]
APART = {"scorers": 'WorkerGroup("scorers", python="/bin/true")'}
EXECUTORS = [
    learner("python_that_does_not_exist", "python='venv/bin/python'"),
    Case(
        "python_that_is_not_executable",
        {"learner": 'WorkerGroup("learner", backend="torch", python="venv/bin/python")'},
        files={"venv/bin/python": b""},
    ),
    learner("python_is_a_folder", "python='.'"),
    learner("python_is_a_version", "python=3.12"),
    learner("python_is_another_program", "python='/bin/true'"),
    Case("python_is_another_program_at_the_start", APART, args=("--run-dir", "run")),
    Case("python_of_the_local_executor", APART, args=("--check", "--executor", "local")),
    Case("storage_units_of_0", args=("--check", "--storage-units", "0")),
    Case("storage_units_on_a_node", args=("--check", "--storage-units", "pernode")),
    Case("storage_units_of_the_local_executor", args=("--executor", "local", "--storage-units", "per-node")),
]
CASES = [*GROUPS, *TRANSPORTS, *MODELS, *EXECUTORS]
