"""A program that talks to an endpoint: python tests/agent.py KIND [ARGUMENT]. Knows no Sluice.

The row on its standard input has a prompt. Kinds are the functions below.
"""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROW = json.load(sys.stdin)
ARGUMENT = sys.argv[2] if len(sys.argv) > 2 else ""
USER = {"role": "user", "content": ROW["prompt"]}


def ask(messages, **more):
    """The policy's message, by OpenAI's API."""
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def talked(turns=3):
    """Messages of some turns, in which the number of characters is the answer."""
    messages = [USER]
    for _ in range(turns):
        messages.append(ask(messages))
        messages.append({"role": "user", "content": str(len(messages[-1]["content"]))})
    return messages


def talk():
    """Three turns, and a result. The argument is the seconds between two turns."""
    messages = [USER]
    for _ in range(3):
        messages.append(ask(messages, max_tokens=5))
        messages.append({"role": "user", "content": str(len(messages[-1]["content"]))})
        time.sleep(float(ARGUMENT or 0))
    print("done, and more")
    print(json.dumps({"reward": 0.5, "end": "done"}))


def rewrite():
    """Changes what the policy has said, and writes what it is told."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until it is written
    messages = talked(1)
    messages[1]["content"] += "1"
    try:
        ask(messages)
    except urllib.error.HTTPError as error:
        Path(f"{ARGUMENT}-{os.environ['SLUICE_SEED']}").write_text(f"{error.code} {error.read().decode()}")


def repeat():
    """Asks twice for each turn, and gets the same twice."""
    messages = [USER]
    for _ in range(2):
        one, two = ask(messages), ask(messages)
        assert one == two
        messages += [one, {"role": "user", "content": "1"}]


def refused():
    """Sends what is refused, and then talks."""
    for more in (
        {"n": 2},
        {"stop": ["a"]},
        {"tool_choice": "required"},
        {"max_tokens": -1},
        {"tools": [1]},
    ):
        try:
            ask([USER], **more)
        except urllib.error.HTTPError as error:
            assert error.code == 400 and next(iter(more)) in error.read().decode()
        else:
            raise AssertionError(more)
    for messages in ([], [{"role": "user", "content": [{"type": "image_url"}]}]):
        try:
            ask(messages)
        except urllib.error.HTTPError as error:
            assert error.code == 400
        else:
            raise AssertionError(messages)
    os.environ["OPENAI_API_KEY"] = "other"
    try:
        ask([USER])
    except urllib.error.HTTPError as error:
        assert error.code == 401
    sys.exit(3)


def fail():
    """Fails after its first turn: always, or once, if the argument is a file that is not there yet."""
    talked(1)
    _fail(lambda: sys.exit(1))


def die():
    """As `fail`, by a signal."""
    talked(1)
    _fail(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hang():
    """As `fail`, by doing nothing."""
    talked(1)
    _fail(lambda: time.sleep(100))


def _fail(how):
    mark = Path(f"{ARGUMENT}-{ROW['prompt']}-{os.environ['SLUICE_SEED']}") if ARGUMENT else None
    if mark is None or not mark.exists():
        if mark is not None:
            mark.touch()
        how()


def differ():
    """Fails once, and then begins otherwise."""
    mark = Path(f"{ARGUMENT}-{os.environ['SLUICE_SEED']}")
    if mark.exists():
        USER["content"] = "00"
    talked(1)
    if not mark.exists():
        mark.touch()
        sys.exit(1)


def silent():
    """Ends without a request."""


def lie():
    """Prints a result that is none."""
    talked(1)
    print('{"reward": "all"}')


def leave():
    """Leaves processes behind, one of them in a session of its own, and waits."""
    import subprocess

    for session in (False, True):
        made = subprocess.Popen(["sleep", "1000"], start_new_session=session)
        with Path(ARGUMENT).open("a") as file:
            file.write(f"{made.pid}\n")
    talked(1)
    time.sleep(1000)


def openai():
    """With OpenAI's client: tools, and a stream."""
    from openai import OpenAI

    client = OpenAI()
    assert client.models.list().data[0].id == os.environ["SLUICE_MODEL"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "double", "parameters": schema}}]
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    made = client.chat.completions.create(model="policy", messages=messages, tools=tools, max_completion_tokens=9)
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls" and made.usage.completion_tokens == 7 and made.usage.prompt_tokens == 30
    messages.append(choice.message.model_dump())
    for call in choice.message.tool_calls:
        doubled = 2 * json.loads(call.function.arguments)["a"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(doubled)})
    with client.chat.completions.stream(
        model="policy", messages=messages, tools=tools, stream_options={"include_usage": True}
    ) as stream:
        made = stream.get_final_completion()
    assert made.usage.completion_tokens == 8, made.usage
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "again"
    messages.append(choice.message.model_dump())
    messages.append({"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "42"})
    made = client.chat.completions.create(model="policy", messages=messages, tools=tools)
    assert made.choices[0].finish_reason == "length"
    print(json.dumps({"end": made.choices[0].message.content, "reward": 1}))


def openai_talk():
    """Two turns with OpenAI's client."""
    from openai import OpenAI

    client, messages = OpenAI(), [USER]
    for _ in range(2):
        made = client.chat.completions.create(model="policy", messages=messages)
        messages += [made.choices[0].message.model_dump(), {"role": "user", "content": "1"}]


def anthropic():
    """With Anthropic's client: tools, and a stream."""
    from anthropic import Anthropic

    client = Anthropic()
    tools = [{"name": "double", "description": "twice", "input_schema": {"type": "object"}}]
    given = {"model": "policy", "max_tokens": 9, "system": "Be brief.", "tools": tools}
    messages = [USER]
    made = client.messages.create(messages=messages, **given)
    assert made.stop_reason == "tool_use" and made.usage.output_tokens == 7
    messages += [{"role": "assistant", "content": made.content}, results(made)]
    with client.messages.stream(messages=messages, **given) as stream:
        made = stream.get_final_message()
    assert made.stop_reason == "tool_use" and made.content[0].text == "again" and made.usage.output_tokens == 8
    messages += [{"role": "assistant", "content": made.content}, results(made)]
    made = client.messages.create(messages=messages, **given)
    assert made.stop_reason == "max_tokens"
    print(json.dumps({"end": made.content[0].text, "reward": 1}))


def results(made):
    """What the calls of a message return."""
    found = [block for block in made.content if block.type == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": c.id, "content": str(2 * c.input["a"])} for c in found]
    return {"role": "user", "content": blocks}


globals()[sys.argv[1]]()
