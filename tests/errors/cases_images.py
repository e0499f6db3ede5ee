"""Images that a check finds missing, models that cannot see them, and worker groups that cannot compute them."""

import base64

from tests.errors.harness import Case

IMPORT = "from stages import Evaluate, LoRA\n\n\n"
ROW = '{"prompt": "which?", "images": ["a.png"], "answer": "2"}\n'
PNG = base64.b64decode(  # of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)
FILES = {"t.jsonl": ROW, "a.png": PNG}
SEEING = {"policy": "Model('Qwen/Qwen3-VL-4B-Instruct', images=True)", "source": "Prompts('t.jsonl', images='images')"}
VISION = "config={'model_type': 'qwen3_vl', 'vision_config': {'depth': 1}}, alphabet=task.alphabet"
MEGATRON = 'WorkerGroup("learner", backend="megatron")'


def seeing(name: str, at: tuple[str, ...], files: dict[str, str | bytes] | None = None, **lines: str) -> Case:
    """Return a case of a graph whose model sees images, with some lines replaced."""
    return Case(name, SEEING | lines, at=at, top=IMPORT, files=files or FILES)


CASES = [
    seeing("image_of_a_row_is_missing", (), {"t.jsonl": ROW + ROW.replace("a.png", "b.png"), "a.png": PNG}),
    seeing("junk_for_an_image", (), {"t.jsonl": ROW, "a.png": b"junk!"}),
    seeing("image_is_a_number", (), {"t.jsonl": ROW.replace('"a.png"', "7")}),
    seeing("more_marks_than_images", (), {"t.jsonl": ROW.replace("which", "<image>, <image>: which"), "a.png": PNG}),
    seeing("column_of_images_is_missing", (), {"t.jsonl": ROW.replace("images", "image"), "a.png": PNG}),
    seeing("column_of_images_is_a_list", ("source",), source="Prompts('t.jsonl', images=['images'])"),
    seeing("images_of_a_generated_task", ("source",), source="Prompts(task, images='images')"),
    seeing("images_that_no_model_sees", ("policy",), policy="Model('Qwen/Qwen3-VL-4B-Instruct')"),
    seeing("images_that_the_source_does_not_have", (), source="Prompts('t.jsonl')"),
    seeing("images_is_a_text", ("policy",), policy="Model('Qwen/Qwen3-VL-4B-Instruct', images='yes')"),
    seeing(
        "model_without_vision",
        ("policy",),
        policy="Model('tiny', config={'model_type': 'qwen3'}, alphabet=task.alphabet, images=True)",
    ),
    seeing("images_on_megatron", ("policy",), learner=MEGATRON),
    seeing("vision_on_megatron", ("learner",), policy=f"Model('tiny', {VISION}, images=True)", learner=MEGATRON),
    seeing("images_with_speculation", ("policy",), sampler='WorkerGroup("sampler", backend="vllm", speculate=4)'),
    seeing(
        "images_with_8_bit_weights",
        ("policy",),
        sampler='WorkerGroup("sampler", backend="vllm", gpus=1, weights="fp8")',
        learner='WorkerGroup("learner", backend="torch", gpus=1)',
    ),
    seeing("images_with_an_adapter", ("policy",), policy=f"Model('tiny', {VISION}, images=True, lora=LoRA())"),
    seeing("held_out_rows_without_images", ("extra",), extra="(Evaluate(policy, 't.jsonl', on=sampler),)"),
]
