"""Invalid data files, data sets, mixtures and held-out prompts that a check finds."""

import gzip

from tests.errors.harness import Case

IMPORT = "from stages import Dataset, Mixture\n\n\n"
ROW = '{"prompt": "r11>", "answer": "2"}\n'
TWO = {"gsm8k/train.jsonl": ROW, "gsm8k/test.jsonl": ROW}
LEVELS = "".join(f'{{"prompt": "r1{i}>", "answer": "", "level": {"null" if i == 1 else i}}}\n' for i in range(4))
NESTED = '{"prompt": "r11>", "reward_model": {"ground_truth": "2"}, "data_source": "sums"}\n'
CHAT = '{{"prompt": [{{"role": "user", "content": "r11>"}}{}], "answer": "2"}}\n'
IMAGE = "Field('image', dtype='uint8', dims='N B')"


def drawn(
    name: str, parameters: str, files: dict[str, str | bytes], at: tuple[str, ...] = ("source",), code: int = 2
) -> Case:
    """Return a case of Prompts, which the error must point at; if it points at a file instead, `at` is empty."""
    return Case(name, {"source": f"Prompts({parameters}, batch=batch)"}, at=at, top=IMPORT, files=files, code=code)


def row(name: str, content: str | bytes, parameters: str = "", file: str = "train.jsonl") -> Case:
    """Return a case of the content of a data file."""
    given = ", ".join(part for part in (repr(file), parameters) if part)
    return drawn(name, given, {file: content}, at=())


def evaluated(
    name: str, source: str, parameters: str = "", files: dict[str, str | bytes] | None = None, **more
) -> Case:
    """Return a case of Evaluate."""
    given = ", ".join(
        part for part in ("policy", source, "" if "on=" in parameters else "on=sampler", parameters) if part
    )
    top = more.pop("top", "") + IMPORT.replace("import ", "import Evaluate, ")
    lines = {"extra": f"(Evaluate({given}),)"} | ({"policy": more.pop("policy")} if "policy" in more else {})
    return Case(name, lines, top=top, files=files or {}, **more)


CHATTING = "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3, chat=True)"
BYTES = 'Model("tiny", config={{"model_type": "qwen3", "max_position_embeddings": {}}}, alphabet="bytes")'
LONG, LONGER = ROW.replace("r11", "r111111111111"), ROW.replace("r11", "r1111111111111111")
WHERE = [
    drawn("folder_of_two_splits", '"gsm8k"', TWO),
    drawn("split_misspelled", 'Dataset("gsm8k", split="tran")', TWO),
    drawn("split_that_no_file_has", 'Dataset("data.jsonl", split="train")', {"data.jsonl": ROW}),
    drawn("folder_of_other_files", '"data"', {"data/readme.md": "Rows\n"}),
    drawn("folder_above_the_files", '"data"', {"data/gsm8k/train.jsonl": ROW}),
    drawn("pattern_matches_nothing", '"*.json"', {"train.jsonl": ROW}),
    drawn("file_misspelled_in_a_folder", '"gsm8k/tran.jsonl"', TWO),
    drawn("file_in_the_home_folder", '"~/train.jsonl"', {}),
    drawn("files_as_a_list", '["a.jsonl", "b.jsonl"]', {"a.jsonl": ROW, "b.jsonl": ROW}),
    drawn("one_of_several_files_is_missing", 'Dataset(("a.jsonl", "b.jsonl"))', {"a.jsonl": ROW}),
    drawn("config_of_a_file", 'Dataset("good.jsonl", config="main")', {"good.jsonl": ROW}),
    drawn("revision_of_a_folder", 'Dataset("gsm8k", revision="main", split="train")', TWO),
    drawn("two_kinds_of_files", '"data"', {"data/a.jsonl": ROW, "data/a.parquet": b"PAR1"}),
    drawn("data_set_is_a_number", "Dataset(7)", {}),
    drawn("split_is_a_number", 'Dataset("gsm8k", split=0)', TWO),
    drawn("data_set_parameter_of_another_library", 'Dataset("gsm8k", streaming=True)', TWO),
]
COLUMNS = [
    drawn("nested_column_misspelled", '"t.jsonl", answer="reward_model.truth"', {"t.jsonl": NESTED}, at=()),
    drawn("column_inside_of_a_text", '"t.jsonl", answer="data_source.name"', {"t.jsonl": NESTED}, at=()),
    drawn("answer_is_an_object", '"t.jsonl", answer="reward_model"', {"t.jsonl": NESTED}, at=()),
    drawn("template_without_a_name", '"t.jsonl", template="Q: {}"', {"t.jsonl": ROW}),
    drawn("template_column_misspelled", '"t.jsonl", template="{promt}="', {"t.jsonl": ROW}, at=()),
    drawn("template_and_prompt", '"t.jsonl", template="{q}=", prompt="q"', {"t.jsonl": ROW}),
    drawn("template_names_no_column", '"t.jsonl", template="Question:"', {"t.jsonl": ROW}),
    drawn("template_with_a_format", '"t.jsonl", template="{prompt:>10}"', {"t.jsonl": ROW}),
    drawn("template_with_an_open_brace", r'"t.jsonl", template="\\boxed{ {prompt}"', {"t.jsonl": ROW}),
    drawn("prompt_is_a_list", '"t.jsonl", prompt=["question"]', {"t.jsonl": ROW}),
    drawn("extra_column_is_missing", '"t.jsonl", extra="level"', {"t.jsonl": ROW}, at=()),
    drawn("extra_column_with_an_odd_row", '"t.jsonl", extra="level"', {"t.jsonl": LEVELS}, at=()),
    drawn("extra_column_in_capitals", '"t.jsonl", extra=("Level",)', {"t.jsonl": ROW}),
    drawn("extra_column_is_a_number", '"t.jsonl", extra=(3,)', {"t.jsonl": ROW}),
    drawn("extra_column_is_the_answer", '"t.jsonl", extra=("answer",)', {"t.jsonl": ROW}),
    drawn("extra_field_is_taken", '"t.jsonl", extra=("info.answer",)', {"t.jsonl": ROW}),
    drawn("as_text_misspelled", '"t.jsonl", as_text=("answr",)', {"t.jsonl": ROW}),
    drawn("system_without_chat", '"t.jsonl", system="You are terse."', {"t.jsonl": ROW}),
    drawn("chat_is_a_text", '"t.jsonl", chat="yes"', {"t.jsonl": ROW}),
    drawn("prompt_seed_below_0", '"t.jsonl", seed=-1', {"t.jsonl": ROW}),
    drawn("columns_of_a_generated_task", 'task, prompt="question"', {}),
    drawn("generated_task_without_shuffle", "task, shuffle=False", {}),
    drawn("prompts_parameter_of_another_library", '"t.jsonl", batch_size=4', {"t.jsonl": ROW}),
]
VALUES = [
    row("messages_without_chat", CHAT.format("")),
    row("chat_ends_with_the_assistant", CHAT.format(', {"role": "assistant", "content": "2"}'), "chat=True"),
    row(
        "chat_message_without_a_role", '{"prompt": [{"from": "human", "value": "r11>"}], "answer": "2"}\n', "chat=True"
    ),
    row("chat_without_messages_in_the_row", '{"prompt": [], "answer": "2"}\n', "chat=True"),
    row("answer_is_null", '{"prompt": "r11>", "answer": null}\n'),
    row("number_as_a_text", ROW.replace("}", ', "level": "3"}'), "extra=Field('level', 'int64')"),
    row("list_as_an_extra_column", ROW.replace("}", ', "level": ["a", "b"]}'), "extra='level'"),
    row(
        "truth_in_a_column_of_strings",
        "".join(ROW.replace("}", f', "hard": {each}}}') for each in ('"yes"', "true")),
        "extra='hard'",
    ),
    row("list_in_a_template", ROW.replace("}", ', "level": [3]}'), "template='{prompt} ({level})'"),
    row("fraction_for_a_whole_number", ROW.replace("}", ', "level": 2.5}'), "extra=Field('level', 'int64')"),
    row("number_out_of_range", ROW.replace("}", ', "level": 300}'), "extra=Field('level', 'uint8')"),
    row("row_of_another_shape", ROW.replace("}", ', "box": [[0, 1]]}'), "extra=Field('box', 'int64', 'N Q 3')"),
    row(
        "rows_that_differ_in_length",
        ROW.replace("}", ', "box": [[0, 1], [2]]}'),
        "extra=Field('box', 'int64', 'N Q 2')",
    ),
    row("image_is_not_there", ROW.replace("}", ', "image": "cat.png"}'), f"extra={IMAGE}"),
    row("several_images_in_a_row", ROW.replace("}", ', "image": ["a.png", "b.png"]}'), f"extra={IMAGE}"),
    row("json_list_instead_of_lines", '[\n  {"prompt": "r11>", "answer": "2"}\n]\n', file="train.json"),
    row("csv_instead_of_lines", "prompt,answer\nr11>,2\n", file="train.csv"),
    row("line_that_ends_in_a_text", ROW + '{"prompt": "2+\n' + ROW),
    row("bytes_of_another_encoding", ROW.encode() + '{"prompt": "\u00e4\u00f6'.encode() + b'\xe9"}\r\n'),
    row("missing_comma_after_a_mark", b"\xef\xbb\xbf" + '{"prompt": "\u00e4" "answer": "2"}\r\n'.encode()),
    row(
        "quotes_in_a_value",
        '{"prompt": "1", "answer": ["say \\"h\u00e4\\"", "it\'s", "12345678901234567890123456789012345"]}',
    ),
    row("compressed_file", gzip.compress(ROW.encode(), mtime=0), file="train.jsonl.gz"),
    row("half_of_a_line", ROW + '{"prompt": "2+2=", "ans'),
    row("jsonl_named_parquet", ROW, file="train.parquet"),
]
MIXTURES = [
    drawn("weight_of_0", 'Mixture(("a.jsonl", 1), ("b.jsonl", 0))', {"a.jsonl": ROW, "b.jsonl": ROW}),
    drawn("mixture_weight_is_a_text", 'Mixture(("a.jsonl", "2"))', {"a.jsonl": ROW}),
    drawn("mixture_without_weights", 'Mixture("a.jsonl", "b.jsonl")', {"a.jsonl": ROW, "b.jsonl": ROW}),
    drawn("mixture_of_nothing", "Mixture()", {}),
    drawn("mixture_of_a_dict", 'Mixture({"a.jsonl": 1})', {"a.jsonl": ROW}),
    drawn("mixture_of_mixtures", 'Mixture((Mixture(("a.jsonl", 1)), 1))', {"a.jsonl": ROW}),
    drawn("source_twice_in_a_mixture", 'Mixture(("a.jsonl", 1), ("a.jsonl", 2))', {"a.jsonl": ROW}),
    drawn("weight_that_is_never_drawn", 'Mixture(("a.jsonl", 1), ("b.jsonl", 1e-9))', {"a.jsonl": ROW, "b.jsonl": ROW}),
    drawn("source_of_a_mixture_is_missing", 'Mixture(("a.jsonl", 1), ("c.jsonl", 1))', {"a.jsonl": ROW}),
    drawn(
        "column_of_one_source_is_missing",
        'Mixture(("a.jsonl", 1), ("b.jsonl", 1)), answer="solution"',
        {"a.jsonl": '{"prompt": "r11>", "solution": "2"}\n', "b.jsonl": ROW},
        at=(),
    ),
    drawn("prompt_outside_the_alphabet", '"a.jsonl"', {"a.jsonl": ROW + ROW.replace("r11>", "1+1=")}, at=()),
    drawn("rows_that_repeat", '"a.jsonl"', {"a.jsonl": ROW * 3}, at=(), code=0),
    drawn(
        "mixture_with_a_task_and_other_columns",
        'Mixture((task, 1), ("q.jsonl", 1)), prompt="question"',
        {"q.jsonl": '{"question": "r11>", "answer": "2"}\n'},
    ),
]
ALONE = [
    drawn("chat_in_prompts_alone", '"t.jsonl", chat=True', {"t.jsonl": ROW}),
    Case(
        "chat_without_a_template",
        {"source": 'Prompts("t.jsonl", batch=batch, chat=True)', "rollout": CHATTING, "policy": BYTES.format(64)},
        at=("policy",),
        files={"t.jsonl": ROW},
    ),
    Case(
        "prompt_longer_than_the_model",
        {"source": 'Prompts("t.jsonl", batch=batch)', "policy": BYTES.format(16)},
        at=(),
        files={"t.jsonl": ROW + LONG + LONGER},
    ),
    evaluated(
        "held_out_prompt_longer_than_the_model",
        '"t.jsonl"',
        "max_tokens=3",
        {"t.jsonl": ROW + ROW.replace("r11", "+".join(["\u00e4\u00e4\u00e4"] * 3))},
        at=(),
        policy=BYTES.format(16),
    ),
]
TASKS = [
    Case("task_of_many_digits", {"task": 'Generated("reverse", digits=9)'}),
    Case("task_of_odd_digits", {"task": 'Generated("add", digits=3)'}),
    Case("task_holds_everything_out", {"task": 'Generated("sort", digits=2)'}),
]
HELD_OUT = [
    evaluated("evaluate_file_is_missing", '"test.jsonl"'),
    evaluated(
        "evaluate_column_is_missing", '"test.jsonl"', files={"test.jsonl": '{"question": "1", "answer": "1"}\n'}, at=()
    ),
    evaluated("evaluate_a_task_by_chat", "task", "chat=True"),
    evaluated("evaluate_nothing_held_out", 'Generated("sort", held_out=0)'),
    evaluated("evaluate_on_the_learner", "task", "on=learner"),
    evaluated("evaluate_every_0", "task", "every=0, prompts=-1"),
    evaluated("evaluate_a_mixture", 'Mixture(("test.jsonl", 1))', files={"test.jsonl": ROW}),
    evaluated("evaluate_none", "None"),
    evaluated("evaluate_template_without_a_name", '"test.jsonl"', 'template="{}"', files={"test.jsonl": ROW}),
    evaluated("evaluate_on_the_host", "task", "on=None"),
    evaluated("evaluate_system_without_chat", '"test.jsonl"', 'system="Be terse."', files={"test.jsonl": ROW}),
    evaluated("evaluate_prompts_is_a_text", "task", 'prompts="all"'),
    evaluated("evaluate_with_a_lambda", "task", "reward=lambda response: 1.0"),
    evaluated(
        "evaluate_with_an_extra_column",
        "task",
        "reward=score",
        at=(),
        top="def score(response: str, level: str):  # here\n    return 1.0\n\n\n",
    ),
    evaluated(
        "evaluate_with_a_column_of_the_data",
        '"test.jsonl"',
        "reward=score",
        files={"test.jsonl": ROW},
        at=(),
        top="def score(response: str, level: str, end: str):  # here\n    return 1.0\n\n\n",
    ),
    evaluated(
        "evaluate_with_a_column_not_named",
        '"test.jsonl"',
        "reward=score",
        files={"test.jsonl": ROW},
        at=(),
        top="def score(response: str, level: str):  # here\n    return 1.0\n\n\n",
    ),
    evaluated(
        "evaluate_with_a_column_of_another_type",
        '"test.jsonl"',
        "reward=score, extra='level'",
        files={"test.jsonl": ROW.replace("}", ', "level": 3}')},
        at=(),
        top="def score(response: str, level: str):  # here\n    return 1.0\n\n\n",
    ),
    evaluated("evaluate_with_columns_of_a_task", "task", "extra='level'"),
]
CASES = [*WHERE, *COLUMNS, *VALUES, *MIXTURES, *ALONE, *TASKS, *HELD_OUT]
