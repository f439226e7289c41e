#!/usr/bin/env python3
"""The official `openai` client against a running `anemoe serve`.

    anemoe serve small.anemoe & python benches/openai_client.py http://127.0.0.1:8080

Fails at the first thing that is not as the client expects. Needs the package openai (written with 2.x).
"""

import json
import sys

import openai


def main():
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[2] if len(sys.argv) > 2 else "none", max_retries=0)
    (model,) = [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model
    ask = dict(model=model, messages=[{"role": "user", "content": "def main():"}], max_tokens=12, temperature=0)
    whole = client.chat.completions.create(**ask)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length"), whole
    assert whole.usage.completion_tokens <= 12 and whole.usage.total_tokens > whole.usage.prompt_tokens
    pieces = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == choice.message.content, (text, choice.message.content)
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    probable = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    entry = probable.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token and entry.logprob <= 0
    several = client.chat.completions.create(**{**ask, "temperature": 1}, n=3, seed=7)
    again = client.chat.completions.create(**{**ask, "temperature": 1}, n=3, seed=7)
    assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    held = client.chat.completions.create(
        **ask, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    )
    assert set(json.loads(held.choices[0].message.content)) == {"ok"}, held
    old = client.completions.create(model=model, prompt=["def f", "class A"], max_tokens=6, temperature=0, logprobs=2, stop=["\n\n\n"])
    assert len(old.choices) == 2 and len(old.choices[0].logprobs.tokens) >= 1
    assert "".join(p.choices[0].text for p in client.completions.create(model=model, prompt="def f", max_tokens=6, temperature=0, stream=True)) == old.choices[0].text
    respond = dict(model=model, input="def main():", max_output_tokens=12, temperature=0)
    response = client.responses.create(**respond)
    assert response.output_text == choice.message.content, (response, choice)
    assert response.usage.output_tokens == whole.usage.completion_tokens
    with client.responses.stream(**respond) as stream:
        events = list(stream)
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete"), events
    assert events[-1].response.output_text == response.output_text
    turns = [{"role": "user", "content": "def main():"}, *[item.to_dict() for item in response.output], {"role": "user", "content": "more"}]
    assert client.responses.create(**{**respond, "input": turns}).usage.input_tokens > response.usage.input_tokens
    for error, call in [
        (openai.BadRequestError, lambda: client.responses.create(**respond, previous_response_id="resp_1")),
        (openai.NotFoundError, lambda: client.chat.completions.create(**{**ask, "model": "other"})),
        (openai.BadRequestError, lambda: client.chat.completions.create(**{**ask, "temperature": -1})),
        (openai.BadRequestError, lambda: client.embeddings.create(model=model, input="x")),
    ]:
        try:
            call()
        except error as e:
            assert e.body["message"], e
        else:
            raise AssertionError(f"{error} was expected")
    print("all as expected")


if __name__ == "__main__":
    main()
