"""Makes families.json: small tokenizers built as those of published families, and what the `tokenizers` package makes of texts.

    python -m venv V && V/bin/pip install tokenizers && V/bin/python make_families.py

The parts (normalizer, pre-tokenizer, post-processor, decoder, flags of the model and of added tokens) are those of the
families' `tokenizer.json`; the vocabularies are small ones of their own.
"""
import json
import pathlib
import tokenizers

HERE = pathlib.Path(__file__).parent
TEXTS = [
    "I'VE we'll 1234567½ naïve cafe\u0301  x=1;//\n\n\tÀÉHTTPServer 漢字かなカナ! ٣٤ 👩‍👩‍👧\r\n the  theory\u00a0of\u2003it …  ",
    "<s>a <m>  the</s>\n<m> b<mask> <s",
    " ",
    "",
]
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA_3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def level(trim=True, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim, "use_regex": regex}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def replace(text, by):
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def decoders(*more):
    return {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *more]}


BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
NFC = {"type": "NFC"}
# normalizer, pre-tokenizer, post-processor, decoder, flags of the model
FAMILIES = {
    "llama-3": (None, sequence(split(LLAMA_3), level()), {"type": "Sequence", "processors": [level(False, True), BOS]}, level(), {"ignore_merges": True}),
    "qwen": (NFC, sequence(split(QWEN), level(False)), level(False), level(False), {}),
    "smollm": (None, sequence({"type": "Digits", "individual_digits": True}, level(regex=True)), None, level(regex=True), {}),
    "olmoe": (NFC, level(regex=True), level(regex=True), level(regex=True), {}),
    "gpt-oss": (None, sequence(split(O200K), level()), level(False, True), level(), {"ignore_merges": True}),
    "gemma-3": (replace(" ", "▁"), {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}, BOS, decoders(), {"byte_fallback": True, "fuse_unk": True}),
    "llama-2": ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]}, None, BOS, decoders(STRIP), {"byte_fallback": True, "fuse_unk": True}),
    "mistral": (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, BOS, decoders(STRIP), {"byte_fallback": True, "fuse_unk": True}),
}
PAIRS = "t h,th e,{0} the,e r,the o,r y,{0} {0},i t,o f,S er,Ser v,1 2,x =".replace("{0}", "▁").split(",")


def added(text, special, **flags):
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": text, "special": special, **off, **flags}


ADDED = [
    added("<s>", True), added("</s>", True), added("<m>", False),
    added("<mask>", True, lstrip=True), added("  ", False, normalized=True),
]


def model(is_bytes):
    """Returns the vocabulary and the merges."""
    if is_bytes:
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    else:
        letters = [f"<0x{b:02X}>" for b in range(256)] + sorted(set("▁theoryixf=12SvI' waé漢"))
    pairs = [p.replace("▁", "Ġ") if is_bytes else p for p in PAIRS]
    merges = [p.split(" ") for p in pairs]
    vocab = [t["content"] for t in ADDED] + letters
    for merge in merges:
        joined = "".join(merge)
        if joined not in vocab:
            vocab.append(joined)
    # A token that no merges make.
    vocab.append("ĠHTTP" if is_bytes else "▁HTTP")
    return {t: i for i, t in enumerate(vocab)}, merges


families = {}
for name, (normalizer, pre, post, decoder, flags) in FAMILIES.items():
    whole = {
        "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder,
        "added_tokens": [{"id": i, **t} for i, t in enumerate(ADDED)],
    }
    vocab, merges = model("byte_fallback" not in flags)
    parts = {"type": "BPE", "vocab": vocab, "merges": merges, **flags}
    t = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **whole, "model": parts}))
    ids = [t.encode(text).ids for text in TEXTS]
    texts = [t.decode(i) for i in ids]
    families[name] = {**whole, "flags": flags, "ids": ids, "decoded": texts}
models = {kind: dict(zip(("vocab", "merges"), model(kind == "bytes"))) for kind in ("bytes", "characters")}
for m in models.values():
    m["vocab"] = list(m["vocab"])
out = {"tokenizers": tokenizers.__version__, "texts": TEXTS, "models": models, "families": families}
lines = [f'"{key}": {json.dumps(value, ensure_ascii=False, separators=(",", ":"))}' for key, value in out.items()]
(HERE / "families.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
