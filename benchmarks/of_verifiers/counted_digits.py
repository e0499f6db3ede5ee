"""A tiny environment of the library verifiers: a model writes digits, and reads how many, in three turns."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class CountedTask(vf.Task[vf.TaskData]):
    """Its reward is the fraction of characters that are 1."""

    @vf.reward()
    async def ones(self, trace: vf.Trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return said.count("1") / max(1, len(said))


class CountedTaskset(vf.Taskset[CountedTask]):
    """Twenty prompts."""

    def load(self):
        return [CountedTask(vf.TaskData(prompt=f"r{number:02}>")) for number in range(20)]


class CountedHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one answer, in the process of the environment."""

    SUPPORTS_RESUME = True
    NEEDS_CONTAINER, EXECUTES_CODE = False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = data.prompt
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else [*map(message_to_wire, said)]
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {secret}"}) as client:
            body = {"model": ctx.model, "messages": messages}
            (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class CountedEnvConfig(vf.EnvConfig):
    """One agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class CountedEnv(vf.Env[CountedEnvConfig]):
    """Three turns."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(2):
                said = await talk.turn(str(len(said.last_reply)))


__all__ = ["CountedTaskset", "CountedHarness", "CountedEnv"]
