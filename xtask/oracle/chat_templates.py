#!/usr/bin/env python3
"""Renders conversations with Hugging Face transformers, for the tests of chat templates.

    python xtask/oracle/chat_templates.py crates/runtime/tests/chat_templates

Every *.jinja of the folder meets every conversation; goldens.json has the text, or null where the template refuses.
Needs transformers and jinja2 (written with 5.23 and 3.1.6).
"""

import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, as <text> & 'more'",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Ort, z. B. Köln"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}


def m(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2, "hourly": True}}}
CONVERSATIONS = {
    "question": dict(messages=[m("user", "Hello there")]),
    "system": dict(messages=[m("system", " Be brief. "), m("user", "Hi\n\nwho are you? ")]),
    "several turns": dict(
        messages=[m("system", "S"), m("user", "a"), m("assistant", " b\n"), m("user", "c"), m("assistant", "d"), m("user", "e {{ x }} é")]
    ),
    "ends with an answer": dict(messages=[m("user", "a"), m("assistant", "b")], add_generation_prompt=False),
    "roles that do not alternate": dict(messages=[m("user", "a"), m("user", "b")]),
    "unknown role": dict(messages=[m("wizard", "a")]),
    "thoughts": dict(messages=[m("user", "a"), m("assistant", "<think>\nhm\n</think>\n\nb"), m("user", "c")]),
    "thinking off": dict(messages=[m("user", "a")], enable_thinking=False),
    "tools": dict(messages=[m("system", "S"), m("user", "Weather in Köln?")], tools=[TOOL]),
    "tool call": dict(
        messages=[m("user", "Weather?"), m("assistant", "", tool_calls=[CALL]), m("tool", "17 °C", name="weather")], tools=[TOOL]
    ),
}
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def main():
    folder = pathlib.Path(sys.argv[1])
    goldens = []
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text()
        for name, case in CONVERSATIONS.items():
            case = {"add_generation_prompt": True, **case}
            try:
                texts, _ = render_jinja_template(
                    conversations=[case["messages"]],
                    chat_template=template,
                    date_string="26 Jul 2024",
                    **{k: v for k, v in case.items() if k != "messages"},
                    **TOKENS,
                )
                text = texts[0]
            except Exception:
                text = None
            goldens.append({"template": path.name, "name": name, "case": case, "text": text})
    (folder / "goldens.json").write_text(json.dumps(goldens, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
