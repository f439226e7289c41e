#!/usr/bin/env python3
"""Load on a running `anemoe serve`, with Python's own library alone.

    anemoe serve small.anemoe --port 8080 & python benches/serve_load.py http://127.0.0.1:8080 --pid $! [PART ...]

Parts: batch (1, 8 and 32 streams: tok/s, times between tokens), chunk (a long prompt while 8 streams decode), turn (second turn of
a long chat), abuse (malformed requests, dropped connections, slow readers, large bodies; memory before and after), or all of them.
Tokens are counted as events of a stream; every stream ignores end tokens.

Other servers with the same API, such as llama.cpp's, take the same load: --event '"content":' counts their events, and --ids 64
--vocabulary 262144 asks with random tokens in place of text.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.parse

ARGS = None


def request(path, body, extra=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n{extra}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def connect():
    return await asyncio.open_connection(ARGS.host, ARGS.port, limit=1 << 24)


async def ask(path, body):
    """Status and document of a whole answer."""
    reader, writer = await connect()
    writer.write(request(path, body))
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"chunked" in head:
        rest = b"".join(part for part in rest.split(b"\r\n")[1::2])
    return int(head.split()[1]), json.loads(rest)


async def stream(path, body):
    """Times of the request and of each token."""
    reader, writer = await connect()
    times = [time.perf_counter()]
    writer.write(request(path, {**body, "stream": True}))
    while True:
        data = await reader.read(1 << 16)
        if not data:
            break
        now = time.perf_counter()
        if b'"error"' in data:
            raise RuntimeError(data[-500:])
        # One event per token that has text; its probabilities make every token an event.
        times += [now] * data.count(ARGS.event.encode())
    writer.close()
    return times


def completion(prompt, n, **more):
    return {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "logprobs": 0, **more}


def intervals(all_times):
    return [b - a for times in all_times for a, b in zip(times[1:], times[2:])]


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(p * len(values)))]


async def streams(n, tokens):
    """Starts streams together; tok/s counts from the first token of the last stream on, while all run."""
    # Tokens that no server has seen before.
    pick = random.Random(time.time())
    ids = lambda: [pick.randrange(10, ARGS.vocabulary) for _ in range(ARGS.ids)]
    prompts = [ids() if ARGS.ids else f"def function_{i}(self, value):\n" for i in range(n)]
    started = time.perf_counter()
    all_times = await asyncio.gather(*(stream("/v1/completions", completion(p, tokens)) for p in prompts))
    first, last = max(t[1] for t in all_times), min(t[-1] for t in all_times)
    counted = sum(1 for times in all_times for t in times[1:] if first < t <= last)
    gaps = intervals(all_times)
    return {
        "streams": n,
        "tok_s": counted / (last - first),
        "tok_s_whole": sum(len(t) - 1 for t in all_times) / (max(t[-1] for t in all_times) - started),
        "ttft_ms": 1e3 * statistics.median(t[1] - t[0] for t in all_times),
        "between_p50_ms": 1e3 * percentile(gaps, 0.5),
        "between_p99_ms": 1e3 * percentile(gaps, 0.99),
    }


async def batch():
    await streams(max(ARGS.streams), 8)
    rows = [[await streams(n, ARGS.tokens) for n in ARGS.streams] for _ in range(ARGS.rounds)]
    out = []
    for i, n in enumerate(ARGS.streams):
        row = {key: statistics.median(r[i][key] for r in rows) for key in rows[0][i]}
        row["gain"] = statistics.median(r[i]["tok_s"] / r[0]["tok_s"] for r in rows)
        out.append(row)
    return out


def long_text(tokens, seed):
    words = "import os sys re json time self value return class def for in if else while None True".split()
    pick = random.Random(seed)
    return " ".join(pick.choice(words) for _ in range(tokens))


async def chunk():
    body = lambda i: completion(f"def function_{i}(self):\n", ARGS.tokens)
    usual = intervals(await asyncio.gather(*(stream("/v1/completions", body(i)) for i in range(8))))
    running = [asyncio.create_task(stream("/v1/completions", body(i))) for i in range(8)]
    await asyncio.sleep(0.05 * ARGS.tokens * statistics.median(usual) * 4)
    arrived = time.perf_counter()
    prompt = await stream("/v1/completions", completion(long_text(ARGS.long, time.time()), 1))
    ended = prompt[1]
    all_times = await asyncio.gather(*running)
    beside = [b - a for times in all_times for a, b in zip(times[1:], times[2:]) if b > arrived and a < ended]
    return {
        "usual_p50_ms": 1e3 * percentile(usual, 0.5),
        "usual_max_ms": 1e3 * max(usual),
        "beside_p50_ms": 1e3 * percentile(beside, 0.5) if beside else None,
        "beside_max_ms": 1e3 * max(beside) if beside else None,
        "prompt_s": ended - arrived,
    }


async def turn():
    messages = [{"role": "user", "content": long_text(ARGS.long, time.time())}]
    body = lambda: {"messages": messages, "max_tokens": 16, "temperature": 0}

    async def first_token():
        reader, writer = await connect()
        started = time.perf_counter()
        writer.write(request("/v1/chat/completions", {**body(), "stream": True, "logprobs": True}))
        data, when = b"", None
        while more := await reader.read(1 << 16):
            data += more
            if when is None and b'"top_logprobs"' in data:
                when = time.perf_counter() - started
        writer.close()
        events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
        return when, "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])

    first, text = await first_token()
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    second, _ = await first_token()
    _, v = await ask("/v1/chat/completions", {**body(), "max_tokens": 1})
    return {"first_ms": 1e3 * first, "second_ms": 1e3 * second, "share": second / first, "prompt_tokens": v["usage"]["prompt_tokens"]}


def memory_mb():
    if not ARGS.pid:
        return None
    for line in open(f"/proc/{ARGS.pid}/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1e3


# A small request of each API.
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 1},
}


async def malformed(pick):
    path = pick.choice(list(GOOD))
    good = json.dumps(GOOD[path])
    kind = pick.randrange(5)
    if kind == 0:
        data = bytearray(good.encode())
        for _ in range(pick.randrange(1, 6)):
            data[pick.randrange(len(data))] = pick.randrange(256)
        raw = request(path, bytes(data))
    elif kind == 1:
        raw = bytes(pick.randrange(256) for _ in range(pick.randrange(1, 400)))
    elif kind == 2:
        raw = request(path, good.encode()[: pick.randrange(len(good))])
    elif kind == 3:
        value = pick.choice(["-1", "1e999", "null", "[]", "{}", '"x"', "NaN", "true", "18446744073709551616", "[1]", '[{"type": 3}]'])
        key = pick.choice(["messages", "temperature", "top_p", "n", "max_tokens", "stop", "seed", "response_format", "tools", "stream", "input",
                           "text", "reasoning", "tool_choice", "system", "thinking", "include", "instructions", "stop_sequences"])
        raw = request(path, f'{good[:-1]}, "{key}": {value}}}'.encode() if key not in GOOD[path] else json.dumps({**GOOD[path], key: 0}).replace(f'"{key}": 0', f'"{key}": {value}').encode())
    else:
        raw = request(path, good.encode()).replace(b"content-length: ", b"content-length: " + str(pick.randrange(9)).encode())
    reader, writer = await connect()
    try:
        writer.write(raw)
        # A server may drop a request whose client has ended its side.
        if kind in (1, 4):
            writer.write_eof()
        answer = await reader.read()
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
    except OSError:
        return -1
    finally:
        writer.close()


async def dropped(pick):
    reader, writer = await connect()
    raw = request("/v1/completions", completion("def f", 200, stream=True))
    writer.write(raw[: pick.randrange(1, 2 * len(raw))])
    await writer.drain()
    if pick.random() < 0.5:
        try:
            await asyncio.wait_for(reader.read(64), 0.05)
        except (asyncio.TimeoutError, OSError):
            pass
    writer.transport.abort()


async def slow():
    reader, writer = await connect()
    writer.write(request("/v1/completions", completion("def f", 300, stream=True)))
    writer.transport.pause_reading()
    await asyncio.sleep(2)
    writer.transport.abort()


async def large(size):
    reader, writer = await connect()
    try:
        writer.write(request("/v1/completions", b"", "").replace(b"content-length: 0", f"content-length: {size}".encode()))
        for _ in range(size >> 20):
            writer.write(b" " * (1 << 20))
            await writer.drain()
        return int((await reader.read()).split()[1])
    except (OSError, IndexError):
        return -1
    finally:
        writer.close()


async def in_groups(jobs, width):
    out = []
    for i in range(0, len(jobs), width):
        out += await asyncio.gather(*(job() for job in jobs[i : i + width]))
    return out


async def abuse():
    pick = random.Random(1)
    # Once before, so that what is allocated once is there.
    await in_groups([lambda: malformed(pick)] * 500 + [lambda: dropped(pick)] * 50, 32)
    await asyncio.sleep(2)
    before = memory_mb()
    statuses = await in_groups([lambda: malformed(pick)] * ARGS.malformed, 32)
    await in_groups([lambda: dropped(pick)] * ARGS.dropped, 16)
    await in_groups([slow] * 32, 32)
    sizes = await in_groups([lambda: large(100 << 20)] * 4, 2)
    await asyncio.sleep(3)
    status, v = await ask("/v1/completions", completion("def f", 4))
    counts = {s: statuses.count(s) for s in sorted(set(statuses))}
    return {"malformed": counts, "large": sizes, "after": status, "memory_mb": [before, memory_mb()]}


async def main():
    parts = {"batch": batch, "chunk": chunk, "turn": turn, "abuse": abuse}
    for name in ARGS.parts or list(parts):
        print(json.dumps({name: await parts[name]()}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--streams", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--event", default='"token_logprobs":[')
    parser.add_argument("--ids", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--malformed", type=int, default=10000)
    parser.add_argument("--dropped", type=int, default=1000)
    ARGS = parser.parse_intermixed_args()
    url = urllib.parse.urlparse(ARGS.url)
    ARGS.host, ARGS.port = url.hostname, url.port
    asyncio.run(main())
