"""Invalid filters and gates that a check finds."""

from tests.errors.harness import SCORE, Case, live_text

IMPORT = "from ops.rewards import boxed\nfrom stages import Filter\n\n\n"
LEARNABLE = "def learnable(reward: list[float]) -> bool:\n    return True\n\n\n"


def filtered(name: str, text: str, *, at: tuple[str, ...] = ("extra",), top: str = "", **lines: str) -> Case:
    """Return a case of a Filter with these arguments."""
    return Case(name, {"extra": f"(Filter({text}),)"} | lines, at=at, top=IMPORT + top)


def rule(name: str, text: str, at: tuple[str, ...] = ()) -> Case:
    """Return a case of a rule `learnable`; the text has `# here` where the error must point."""
    return filtered(name, "learnable", at=at, top=text + "\n\n")


CASES = [
    filtered("rule_misspelled", "'zero_std'"),
    filtered("rule_of_another_library", "'accuracy'"),
    filtered("rule_is_a_number", "0.5"),
    filtered("rule_is_a_lambda", "lambda reward: max(reward) > 0"),
    rule("rule_is_async", "async def learnable(reward: list[float]):  # here\n    return True\n"),
    rule("rule_is_a_generator", "def learnable(reward: list[float]):  # here\n    yield True\n"),
    rule("rule_reads_nothing", "def learnable():  # here\n    return True\n"),
    rule("rule_takes_anything", "def learnable(reward: list[float], **more):  # here\n    return True\n"),
    rule("rule_reads_a_field_of_no_stage", "def learnable(rewards: list[float]):\n    return True\n", at=("extra",)),
    rule("rule_reads_logprobs", "def learnable(prev_logprobs: list):\n    return True\n", at=("prev",)),
    rule("rule_reads_weights", "def learnable(reward: list[float], served_weights: int):  # here\n    return True\n"),
    filtered("rule_and_of", "learnable, of='reward_boxed'", top=LEARNABLE, reward="Reward(exact_match, boxed)"),
    filtered("filter_of_a_text", "of='response'"),
    filtered("filter_of_one_reward", "of='reward_exact_match'"),
    filtered("filter_of_a_misspelled_part", "of='reward_exact'", reward="Reward(exact_match, boxed)"),
    filtered("filter_of_a_function", "of=exact_match"),
    filtered("max_rounds_of_1", "max_rounds=1"),
    filtered("max_rounds_is_a_text", "max_rounds='5'"),
    filtered(
        "filter_of_groups_of_one",
        "",
        rollout="Rollout(policy, on=sampler, samples_per_prompt=1, max_tokens=3)",
    ),
    filtered("two_filters", "", at=("extra", "versions"), versions="Filter(of='reward')"),
    filtered(
        "two_gates",
        "",
        at=("extra", "versions"),
        versions="Second()",
        top="class Second(Filter):\n    name = 'second'\n\n\n",
    ),
    Case("gate_per_batch", {"extra": "(Late(),)"}, top=IMPORT + "class Late(Filter):\n    per = 'batch'\n\n\n"),
    Case(
        "nothing_behind_the_filter",
        text=live_text(IMPORT + LEARNABLE + SCORE, count="Filter(learnable)"),
        at=("count",),
    ),
]
