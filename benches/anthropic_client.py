#!/usr/bin/env python3
"""The official `anthropic` client against a running `anemoe serve`.

    anemoe serve small.anemoe & python benches/anthropic_client.py http://127.0.0.1:8080

Fails at the first thing that is not as the client expects. Needs the package anthropic (written with 2.14).
"""

import sys

import anthropic


def main():
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key=sys.argv[2] if len(sys.argv) > 2 else "none", max_retries=0)
    (model,) = [m.id for m in client.models.list()]
    ask = dict(model=model, max_tokens=12, messages=[{"role": "user", "content": "def main():"}], extra_body={"temperature": 0})
    whole = client.messages.create(**ask)
    assert whole.role == "assistant" and whole.stop_reason in ("end_turn", "max_tokens"), whole
    text = "".join(block.text for block in whole.content if block.type == "text")
    with client.messages.stream(**ask) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == text and last.usage.output_tokens == whole.usage.output_tokens, (pieces, text)
    counted = client.messages.count_tokens(model=ask["model"], messages=ask["messages"])
    assert counted.input_tokens == whole.usage.input_tokens
    stopped = client.messages.create(**{**ask, "max_tokens": 40}, stop_sequences=[text[2:4]])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == text[2:4], stopped
    system = client.messages.create(**ask, system=[{"type": "text", "text": "import os"}])
    assert system.usage.input_tokens > whole.usage.input_tokens
    for error, change in [
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.BadRequestError, {"temperature": -1}),
        (anthropic.BadRequestError, {"mcp_servers": [{"name": "x"}]}),
    ]:
        try:
            client.messages.create(**{**ask, "extra_body": change})
        except error as e:
            assert e.body["type"] == "error" and e.body["error"]["message"], e
        else:
            raise AssertionError(f"{error} was expected")
    print("all as expected")


if __name__ == "__main__":
    main()
