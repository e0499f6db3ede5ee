"""Invalid episodes that a check finds."""

from dataclasses import replace

from tests.errors.cases_running import trained
from tests.errors.harness import Case

TOP = """from stages import Deadlines, End, Endpoint, Environment, Episode, Evaluate, Filter


class Quiz(Environment):
    def open(self, row, draw):
        return None, row["prompt"]

    def turn(self, state, reply):
        return End()


class Level(Quiz):
    reads = ("prompt", "level")


class Half(Environment):
    def open(self, row, draw):
        return None, row["prompt"]


"""
FORGETFUL = """class Forgetful(Quiz):
    def turn(self, reply):
        return End()

    def close(self):
        pass


"""
LONG = """def long(response_ids: list[int], answer: str) -> float:
    return float(len(response_ids))


"""
CLOSED = """class Closed(Quiz):
    def open(self, row, draw):
        raise OSError("there is no room")


"""
EPISODE = "Episode(policy, {environment}, on=sampler, samples_per_prompt=2, tokens=8, turn_tokens=3{more})"


def episode(name: str, more: str = "", environment: str = "Quiz()", **lines: str) -> Case:
    """Return a case of an Episode with these arguments."""
    written = EPISODE.format(environment=environment, more=f", {more}" if more else "")
    return Case(name, {"rollout": written, "extra": "(Filter('complete'),)"} | lines, at=("rollout",), top=TOP)


def evaluated(name: str, given: str, **lines: str) -> Case:
    """Return a case of an Evaluate of episodes."""
    extra = f"(Filter('complete'), Evaluate(policy, task, on=sampler, episode={given}))"
    made = episode(name, extra=extra, **lines)
    return Case(name, made.lines, at=("extra",), top=TOP)


def endpoint(name: str, more: str, **lines: str) -> Case:
    """Return a case of an Endpoint with these arguments."""
    written = f"Endpoint(policy, on=sampler, samples_per_prompt=2, tokens=8, turn_tokens=3, {more})"
    return Case(name, {"rollout": written, "extra": "(Filter('complete'),)"} | lines, at=("rollout",), top=TOP)


CASES = [
    episode("no_environment", environment="None"),
    episode("environment_is_a_class", environment="Quiz"),
    episode("environment_without_turns", environment="Half()"),
    replace(episode("environment_without_its_state", environment="Forgetful()"), top=TOP + FORGETFUL),
    episode("lost_episodes_that_nothing_drops", extra="()"),
    episode("lost_episodes_behind_a_filter", extra="(Filter(),)"),
    Case("more_lost_than_all", {"extra": "(Filter('complete', lost=1.5),)"}, at=("extra",), top=TOP),
    replace(episode("reward_of_all_tokens", reward="Reward(long)"), top=TOP + LONG, at=()),
    episode("episode_of_no_turns", "turns=0"),
    episode("episode_without_processes", "environments=0, retries=-1"),
    replace(episode("environments_on_the_learner", "environments=learner"), at=("learner",)),
    replace(
        episode(
            "environments_with_gpus",
            "environments=scorers",
            reward="Reward(exact_match)",
            scorers="WorkerGroup('envs', workers=2, gpus=2, tensor_parallel=2, colocated=sampler)",
        ),
        at=("scorers",),
    ),
    episode("environments_of_no_group", "environments='envs'"),
    episode("renderer_of_texts", "renderer='qwen3'"),
    episode("renderer_that_is_no_name", "renderer=('qwen3',)"),
    episode("deadlines_are_a_number", "deadlines=30"),
    episode("deadline_of_0", "deadlines=Deadlines(turn_s=0)"),
    replace(
        endpoint("endpoint_without_a_chat_template", "command=('python', 'agent.py')", policy='Model("chatty")'),
        at=("policy",),
        files={"chatty/config.json": '{"model_type": "qwen3"}', "chatty/tokenizer_config.json": "{}"},
    ),
    endpoint("endpoint_whose_command_is_a_text", "command='python agent.py', commands=0, variables={'A': 1}"),
    endpoint("endpoint_that_nothing_drops", "command=('true',)", extra="()"),
    Case(
        "turns_without_episodes",
        {"advantage": 'Advantage("turn")', "train": "Train(policy, on=learner, lr=1e-3, advantage='token')"},
        at=("advantage",),
    ),
    replace(episode("turns_trained_as_samples", advantage='Advantage("turn")'), at=("train",)),
    evaluated("evaluation_of_no_episode", "Quiz()"),
    evaluated("evaluation_with_an_unknown_column", "Episode(policy, Level(), on=sampler, turns=2)"),
    trained(
        "evaluation_that_loses_all",
        {
            "extra": "(Evaluate(policy, task, on=sampler, prompts=2, episode=Episode("
            "policy, Closed(), on=sampler, tokens=8, turn_tokens=3, retries=0)),)"
        },
        at=("extra",),
        top=TOP + CLOSED,
    ),
    evaluated("evaluation_of_another_model", "Episode(policy.frozen(), Quiz(), on=sampler)"),
]
