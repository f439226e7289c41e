#!/usr/bin/env python3
"""Holds our Jinja against Python's: templates of a folder over conversations, and generated expressions.

    cargo build -p anemoe-text --example render
    python xtask/oracle/jinja.py target/debug/examples/render --templates FOLDER --expressions 20000
    python xtask/oracle/jinja.py target/debug/examples/render --goldens crates/text/src/chat/jinja/goldens.json

What Python renders must be equal byte for byte; what it refuses may be refused. `--goldens` writes Python's texts for the
expressions of the file. Needs jinja2 (written with 3.1.6).
"""

import argparse
import datetime
import functools
import json
import pathlib
import random
import subprocess
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


def environment():
    """Makes the environment of Hugging Face transformers."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: datetime.datetime.now(datetime.timezone.utc).strftime(f)
    return env


ENV = environment()


@functools.lru_cache(4)
def compiled(template):
    return ENV.from_string(template)


def python_text(template, variables):
    try:
        text = compiled(template).render(**variables)
        text.encode()
        return text
    except RecursionError:
        return None
    except Exception as e:
        return e


def compare(renderer, cases, most=40):
    """Renders cases (name, template, variables) with both; prints the differences."""
    ours = subprocess.Popen([renderer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wrong = rendered = 0
    for name, template, variables in cases:
        theirs = python_text(template, variables)
        if not isinstance(theirs, str) or " object at 0x" in theirs or "<function" in theirs or "<built-in" in theirs:
            theirs = None
        ours.stdin.write(json.dumps({"template": template, "variables": variables}) + "\n")
        ours.stdin.flush()
        answer = ours.stdout.readline()
        if not answer:
            sys.exit(f"the renderer ended at {name}: {template!r}")
        answer = json.loads(answer)
        if theirs is None:
            continue
        rendered += 1
        if answer.get("text") != theirs:
            wrong += 1
            if wrong <= most:
                found = answer.get("text", answer.get("error"))
                at = next((i for i, (a, b) in enumerate(zip(found, theirs)) if a != b), min(len(found), len(theirs)))
                cut = slice(max(0, at - 60), at + 60)
                sign = "text" if "text" in answer else "error"
                print(f"{name}\n  ours ({sign}): {found[cut]!r}\n  python: {theirs[cut]!r}")
    ours.stdin.close()
    ours.wait()
    print(f"{rendered} rendered by Python, {wrong} differ")
    return wrong


def m(role, content, **more):
    return {"role": role, "content": content, **more}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": "Does <it> & 'more' \"ä\"\nline", "parameters": parameters}}


TOOLS = [
    tool("weather", place={"type": "string", "description": "Ort, z. B. Köln", "enum": ["a", "b"]}, days={"type": ["integer", "null"], "default": 1e-05}),
    tool("search", query={"type": "object", "properties": {"q": {"type": "array", "items": {"type": "number"}}}, "additionalProperties": False}),
    tool("none"),
]
ARGUMENTS = {"place": "Köln 'x' \"y\"", "days": 2, "hourly": True, "none": None, "x": 1e16, "y": 0.00001, "list": [1, "a", None, {"b": 1.5}], "o": {"k": "v"}}


def call(name, arguments, id="call_1234"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    parts = [{"type": "text", "text": "one ü"}, {"type": "image"}, {"type": "text", "text": " two"}]
    called = [
        m("user", "Weather?"),
        m("assistant", "", tool_calls=[call("weather", ARGUMENTS), call("search", {"query": {}}, "call_56789")]),
        m("tool", "17 °C", name="weather", tool_call_id="call_1234"),
        m("tool", '{"a": [1, 2]}', name="search", tool_call_id="call_56789"),
        m("assistant", "It is warm.\n"),
        m("user", "Thanks"),
    ]
    many = {
        "question": [m("user", "Hello there")],
        "system": [m("system", " Be brief. "), m("user", "Hi\n\nwho are you? ")],
        "developer": [m("developer", "Be brief."), m("user", "Hi")],
        "turns": [m("system", "S"), m("user", "a"), m("assistant", " b\n"), m("user", "c"), m("assistant", "d"), m("user", "e {{ x }} é 🦀")],
        "answer last": [m("user", "a"), m("assistant", "b")],
        "two users": [m("user", "a"), m("user", "b")],
        "unknown role": [m("wizard", "a")],
        "empty": [m("system", ""), m("user", ""), m("assistant", ""), m("user", "")],
        "no messages": [],
        "none": [m("user", "a"), m("assistant", None), m("user", "b")],
        "thoughts": [m("user", "a"), m("assistant", "<think>\nhm\n</think>\n\nb"), m("user", "c"), m("assistant", "b", reasoning_content="r\n"), m("user", "d")],
        "thinking": [m("user", "a"), m("assistant", "b", reasoning_content="why", thinking="why", reasoning="why"), m("user", "c")],
        "parts": [m("system", [{"type": "text", "text": "S"}]), m("user", parts), m("assistant", [{"type": "text", "text": "A"}]), m("user", parts)],
        "calls": called,
        "call as text": [m("user", "W"), m("assistant", None, tool_calls=[call("weather", json.dumps(ARGUMENTS))]), m("tool", "17", tool_call_id="call_1234")],
        "call with text": [m("user", "W"), m("assistant", "I look", reasoning_content="t", tool_calls=[call("weather", ARGUMENTS)]), m("tool", [{"type": "text", "text": "17"}], tool_call_id="call_1234", name="weather"), m("assistant", "ok")],
        "call without id": [m("user", "W"), m("assistant", "", tool_calls=[{"type": "function", "function": {"name": "none", "arguments": {}}}]), m("tool", "17", name="none"), m("user", "x")],
        "call, bare": [m("user", "W"), m("assistant", "", tool_calls=[{"name": "weather", "arguments": ARGUMENTS}]), m("tool", {"temperature": 1e-7, "ok": True}, name="weather")],
        "ipython": [m("user", "W"), m("assistant", "", tool_calls=[call("python", {"code": "print(1)"})]), m("ipython", {"output": 1})],
    }
    settings = [
        {},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "tools": TOOLS},
        {"add_generation_prompt": True, "enable_thinking": False, "thinking": False},
        {"add_generation_prompt": True, "enable_thinking": True, "thinking": True, "reasoning_effort": "high", "tools": TOOLS[:1]},
        {"add_generation_prompt": False, "preserve_thinking": True, "tools_in_user_message": False, "builtin_tools": ["wolfram_alpha", "python"], "custom_tools": TOOLS},
        {"documents": [{"title": "T", "text": "x\ny", "doc_id": 1}], "add_generation_prompt": True, "available_tools": TOOLS, "keep_past_thinking": True},
    ]
    for name, messages in many.items():
        for i, more in enumerate(settings):
            yield f"{name} {i}", {
                "messages": messages, "tools": None, "documents": None, "add_generation_prompt": False,
                "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "date_string": "26 Jul 2024", **more,
            }


def template_cases(folder):
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.is_file() and "jinja" in path.name:
            text = path.read_text()
            for name, variables in conversations():
                yield f"{path.name}: {name}", text, variables


VARIABLES = {
    "s": "Hello, wörld", "t": "  a b  c\t\n", "e": "", "q": "it's \"x\"\\n", "u": "Ünï\u200b🦀ß", "n": 7, "z": 0, "neg": -3, "f": 2.5, "small": 1e-05,
    "big": 1e16, "huge": 12345678901234567890, "yes": True, "no": False, "nil": None, "l": [3, 1, 2], "w": ["b", "A", "c", "a"], "mixed": [1, "a", None, True, 1.0, [2]],
    "d": {"b": 1, "a": "x", "c": [1, {"k": None}]}, "o": {}, "em": [], "rows": [{"n": "x", "v": 3}, {"n": "Y", "v": 1}, {"n": "x", "v": 2}], "lines": "one\ntwo\r\n\nthree",
}
ATOMS = list(VARIABLES) * 2 + [
    "'a'", "'a,b,,c'", "'%s-%s'", "'{}:{:>5}'", "'x=y=z'", "1", "2", "-1", "10", "0.1", "1e100", "3.0", "none", "true", "false", "missing", "[]", "{}", "(1, 2)", "('a',)",
    "[1, 2, 3]", "['x', 'y']", "{'k': 1, 'j': [1.5]}", "range(5)", "range(1, 10, 3)", "'aXbXc'", "'ABC'", "'abc def'", "'12'", "'-5'", "'3.7'", "'é'", "d.items()", "d.keys()", "d.values()",
]
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "and", "or", "in", "not in"]
METHODS = [
    "upper()", "lower()", "strip()", "lstrip()", "rstrip()", "strip('a ')", "title()", "capitalize()", "swapcase()", "split()", "split(',')", "split(none, 1)", "split('X', 1)", "rsplit()",
    "rsplit(' ', 1)", "rsplit(none, 1)", "splitlines()", "splitlines(true)", "partition('=')", "rpartition('=')", "replace('a', 'bb')", "replace('', '-')", "replace('a', 'b', 1)", "find('b')",
    "rfind('b')", "index('b')", "count('b')", "count('')", "startswith('a')", "startswith(('a', 'H'))", "endswith('c')", "removeprefix('a')", "removesuffix('c')", "zfill(6)", "ljust(8, '.')",
    "rjust(8)", "center(9, '*')", "isdigit()", "isalpha()", "isalnum()", "isspace()", "isupper()", "islower()", "istitle()", "isnumeric()", "isdecimal()", "isidentifier()", "isascii()",
    "format(1, 'x')", "format(k=3)", "join(['x', 'y'])", "expandtabs(4)", "casefold()", "find('b', 2)", "items()", "keys()", "values()", "get('a')", "get('zz', 5)", "get('k')", "index(2)", "count(1)",
    "copy()", "append(1)", "pop()", "update({})", "a", "b", "items", "n", "is_integer()", "bit_length()",
]
FILTERS = [
    "abs", "batch(2)|list", "batch(2, 'z')|list", "capitalize", "center(12)", "count", "d('x')", "default('x', true)", "dictsort", "dictsort(by='value')", "dictsort(reverse=true)", "e", "escape",
    "filesizeformat", "first", "float", "float('x')", "format('a', 2)", "forceescape", "groupby('n')", "indent", "indent(2, true)", "indent('> ', blank=true)", "int", "int(5)", "int(base=16)",
    "join", "join('-')", "join(',', attribute='n')", "last", "length", "list", "lower", "items|list", "map('upper')|list", "map(attribute='n')|list", "map(attribute='q', default='w')|list", "min", "max",
    "min(attribute='v')", "pprint", "reject('none')|list", "reject('equalto', 1)|list", "rejectattr('n', 'equalto', 'x')|list", "replace('a', 'b')", "replace('a', 'b', 1)", "reverse|list", "reverse",
    "round", "round(1)", "round(-1)", "round(1, 'ceil')", "round(2, 'floor')", "safe", "select|list", "select('string')|list", "select('gt', 1)|list", "selectattr('v', 'gt', 1)|list", "selectattr('n')|list",
    "slice(2)|list", "slice(3, 'z')|list", "sort", "sort(reverse=true)", "sort(case_sensitive=true)", "sort(attribute='v')", "sort(attribute='n,v')", "string", "striptags", "sum", "sum(attribute='v')",
    "sum(start=1.5)", "title", "trim", "trim('a')", "truncate(8)", "truncate(8, true)", "truncate(6, false, '~', 0)", "unique|list", "unique(attribute='n')|list", "upper", "urlencode", "wordcount",
    "wordwrap(6)", "xmlattr", "tojson", "tojson(indent=2)", "tojson(separators=(',', ':'))", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "tojson(indent=1, sort_keys=true)", "attr('a')",
]
TESTS = [
    "odd", "even", "divisibleby 2", "divisibleby(3)", "defined", "undefined", "none", "boolean", "false", "true", "integer", "float", "lower", "upper", "string", "mapping", "number", "sequence",
    "iterable", "callable", "sameas none", "sameas true", "in [1, 'a', none]", "eq 1", "ne 1", "gt 1", "ge 2", "lt 3", "le 2", "escaped", "equalto('a')",
]
SUBSCRIPTS = ["[0]", "[-1]", "[1:]", "[:-1]", "[::-1]", "[1:3]", "[::2]", "[-2:]", "[5:1:-1]", "['a']", "['items']", "[99]", "[none:2]", ".0", "[true]"]
FORMATS = [
    "%s", "%r", "%d", "%5d", "%-5d|", "%05d", "%+d", "%x", "%X", "%#x", "%o", "%e", "%.2e", "%f", "%.1f", "%08.3f", "%g", "%.3g", "%G", "%c", "%%", "%10s", "%-10s|", "%.2s", "% d", "%i", "%(a)s %(b)s",
    "%s %s", "%5.1f%%",
]
SPECS = [
    "{}", "{:d}", "{:5}", "{:<5}|", "{:^7}", "{:>7}", "{:*^9}", "{:05}", "{:+}", "{:,}", "{:_}", "{:x}", "{:#x}", "{:b}", "{:o}", "{:e}", "{:.2f}", "{:.3}", "{:g}", "{:.0%}", "{:10.3f}", "{!r}", "{!s:>8}",
    "{0}{0}", "{0[0]}", "{0[a]}", "{{}}", "{:G}", "{:n}", "{:.1e}", "{:=+7}", "{:,.2f}", "{:c}",
]


def expression(r, depth=3):
    """Makes an expression."""
    if depth == 0 or r.random() < 0.12:
        return r.choice(ATOMS)
    inner = lambda: expression(r, depth - 1)
    kind = r.randrange(14)
    if kind <= 1:
        return f"({inner()} {r.choice(BINARY)} {inner()})"
    if kind <= 4:
        return f"({inner()}).{r.choice(METHODS)}"
    if kind <= 7:
        return f"({inner()})|{r.choice(FILTERS)}"
    if kind == 8:
        return f"({inner()}) is {r.choice(['', 'not '])}{r.choice(TESTS)}"
    if kind == 9:
        return f"({inner()}){r.choice(SUBSCRIPTS)}"
    if kind == 10:
        return r.choice(["[{0}, {1}]", "({0}, {1})", "({0},)", "{{'x': {0}, 'y': {1}}}", "({0} if {1} else {0})", "(not {0})", "(-{0})", "({0} if {1})"]).format(inner(), inner())
    if kind == 11:
        return f"{r.choice(FORMATS)!r} % {r.choice(['({0},)', '({0}, {1})', '({0})', '[{0}]', 'd'])}".format(inner(), inner())
    if kind == 12:
        return f"{r.choice(SPECS)!r}.format({inner()}, {inner()})"
    return f"({inner()} {r.choice(BINARY[8:14])} {inner()} {r.choice(BINARY[8:14])} {inner()})"


STATEMENTS = [
    "{{% for x in {0} %}}{{{{ loop.index }}}}/{{{{ loop.length }}}}:{{{{ x }}}}{{{{ ', ' if not loop.last }}}}{{% else %}}none{{% endfor %}}",
    "{{% for x in {0} if {1} %}}\n  {{{{ x }}}} {{{{ loop.previtem }}}} {{{{ loop.nextitem }}}} {{{{ loop.changed(x) }}}}\n{{% endfor %}}",
    "{{% set x = {0} %}}{{{{ x }}}}|{{{{ x ~ {1} }}}}",
    "{{% if {0} %}}yes{{% elif {1} %}}other{{% else %}}no{{% endif %}}",
    "{{% set ns = namespace(a={0}) %}}{{% for x in [1, 2] %}}{{% set ns.a = {1} %}}{{% endfor %}}{{{{ ns.a }}}}",
    "{{% macro f(a, b={0}) %}}[{{{{ a }}}},{{{{ b }}}}]{{% endmacro %}}{{{{ f({1}) }}}}{{{{ f(b={1}) }}}}",
    "{{% filter upper %}}{{{{ {0} }}}}{{% endfilter %}}",
    "{{% set x | trim %}} {{{{ {0} }}}} {{% endset %}}{{{{ x }}}}",
    "{{% for a, b in {0} %}}{{{{ a }}}}={{{{ b }}}};{{% endfor %}}",
]


def expression_cases(count, seed):
    r = random.Random(seed)
    for i in range(count):
        if r.random() < 0.15:
            template = r.choice(STATEMENTS).format(expression(r, 2), expression(r, 2))
        else:
            template = "{{ " + expression(r) + " }}"
        yield template, template, VARIABLES


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("renderer")
    parser.add_argument("--templates", metavar="FOLDER")
    parser.add_argument("--expressions", type=int, metavar="N", default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goldens", metavar="FILE")
    args = parser.parse_args()
    if args.goldens:
        path = pathlib.Path(args.goldens)
        goldens = json.loads(path.read_text())
        rows = [[template, python_text(template, goldens["variables"])] for template, _ in goldens["rows"]]
        refused = [template for template, text in rows if not isinstance(text, str)]
        if refused:
            sys.exit(f"Python refuses {refused}")
        lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
        variables = json.dumps(goldens["variables"], ensure_ascii=False)
        path.write_text(f'{{"variables": {variables},\n "rows": [\n{lines}\n ]}}\n')
    wrong = 0
    if args.templates:
        wrong += compare(args.renderer, template_cases(args.templates))
    if args.expressions:
        wrong += compare(args.renderer, expression_cases(args.expressions, args.seed))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
