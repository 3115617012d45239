#!/usr/bin/env python3
"""Compares our tokenizer with Hugging Face's `tokenizers` loading the same tokenizer.json.

    pip install tokenizers
    python3 tests/src/data/check_tokenizers.py build/cpu/kestrel tests/fixtures/text/kjv_excerpt.txt

For both split patterns: a vocabulary trained by us on TEXT encodes TEXT, text of many scripts, random text over an
awkward alphabet and text with special tokens; and a vocabulary made to show where pieces are cut encodes nearly every
code point of Unicode next to a letter, a digit, a space, a dot, an apostrophe and a line break.  Ids must be equal, and
both must decode to the text.  Exit status 1 at the first difference, which is printed with its context.
"""
import json
import os
import random
import subprocess
import sys
import tempfile

try:
    import tokenizers
except ImportError:
    sys.exit("check_tokenizers: Python's package `tokenizers` is missing (pip install tokenizers)")

PATTERNS = ("cl100k", "gpt2")
SPECIALS = ["<|endoftext|>", "<|im_start|>"]
SCRIPTS = """Élan vital, naïve café: l'été où ça s'arrête... ÀÉÎÕÜ ß ŉ ſtraße it'ſ IT'S we'Ll
Привет, мир! Ελληνικά: άέήίόύώ. עברית בדיקה 123 العربية ١٢٣٤٥ हिन्दी परीक्षण ५६७८ ไทยทดสอบ
世界，你好！日本語のテキスト、ひらがなカタカナ。한국어 텍스트 — 全角１２３ＡＢＣ
😀😃👍🏽 👨‍👩‍👧‍👦 🇫🇷🏴󠁧󠁢󠁥󠁮󠁧󠁿 e\u0301a\u0308 ½ ² Ⅷ ㊿ \u00a0\u2003\u3000\u2028\u0085 tab\there\r\n\r\n  end
x = {"a": [1, 22, 333, 4444]};  // comment\n\n\n\tdef f(a_b, *c):\n\t\treturn a_b**2  # 100%
"""


def run(program, *arguments):
    subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL)


class Pair:
    """The same tokenizer.json in both programs."""

    def __init__(self, program, path, folder):
        self.program, self.path, self.folder = program, path, folder
        self.theirs = tokenizers.Tokenizer.from_file(path)

    def ours(self, text, allow_special):
        source, ids, back = (os.path.join(self.folder, n) for n in ("source", "ids", "back"))
        with open(source, "wb") as f:
            f.write(text.encode())
        flags = ["--allow-special"] if allow_special else []
        run(self.program, "tokenizer", "encode", "--tokenizer", self.path, "--out", ids, source, *flags)
        run(self.program, "tokenizer", "decode", "--tokenizer", self.path, "--out", back, ids)
        with open(back, "rb") as f:
            assert f.read() == text.encode(), "decode(encode(text)) is not the text"
        with open(ids) as f:
            return [int(i) for i in f.read().split()]

    def compare(self, name, text, allow_special=False):
        ours = self.ours(text, allow_special)
        encoding = self.theirs.encode(text, add_special_tokens=False)
        theirs = encoding.ids
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            begin = encoding.offsets[min(at, len(theirs) - 1)][0]
            sys.exit(f"check_tokenizers: {name}: token {at} differs: ours {ours[at:at + 6]}, "
                     f"theirs {theirs[at:at + 6]}, in {text[max(0, begin - 10):begin + 20]!r}")
        assert self.theirs.decode(theirs, skip_special_tokens=False) == text, f"{name}: they decode to another text"
        print(f"  {name}: {len(ours)} tokens agree")


def random_text(seed, pieces):
    alphabet = list("aZé7 \n\r\t.'_s-\"") + ["  ", "\n\n", "'ll", "'T", "\u00a0", "\u3000", "世", "٣", "e\u0301", "😀"]
    alphabet += ["ſ", "\x00", "\x1c", "\u200b", "ǅ", "\u0345", "ª", "\ufeff", "\U000e0041"]
    rng = random.Random(seed)
    return "".join(rng.choice(alphabet) for _ in range(pieces))


def border_tokenizer(path, base):
    """Of every two bytes of which one is a probe, a token: two neighbours are merged unless a cut parts them."""
    with open(base) as f:
        spec = json.load(f)
    spelled = [None] * 256
    for token, number in spec["model"]["vocab"].items():
        if number < 256:
            spelled[number] = token
    probes = [ord(c) for c in "x1. '\ns"]
    pairs = [(p, b) for p in probes for b in range(256)]
    pairs += [(b, p) for p in probes for b in range(256) if b not in probes]
    vocab = {token: number for number, token in enumerate(spelled)}
    merges = []
    for a, b in pairs:
        merges.append([spelled[a], spelled[b]])
        vocab[spelled[a] + spelled[b]] = len(vocab)
    spec["model"].update(vocab=vocab, merges=merges)
    spec["added_tokens"] = []
    with open(path, "w") as f:
        json.dump(spec, f)


def every_code_point():
    points = [c for c in range(0x110000) if c < 0x32000 or 0xE0000 <= c < 0xE0200 or c % 97 == 0]
    return "".join(f"x{c}x{c}.{c} {c}1{c}'{c}\n{c}s" for c in map(chr, points) if not 0xD800 <= ord(c) < 0xE000)


def main(program, text_path):
    with open(text_path, encoding="utf-8", newline="") as f:
        text = f.read()
    with tempfile.TemporaryDirectory() as folder:
        for pattern in PATTERNS:
            print(f"pattern {pattern}, tokenizers {tokenizers.__version__}")
            path = os.path.join(folder, pattern + ".json")
            corpus = os.path.join(folder, "corpus.txt")
            with open(corpus, "w", encoding="utf-8", newline="") as f:
                f.write(text + SCRIPTS * 3 + random_text(1, 20000))
            run(program, "tokenizer", "train", "--vocab-size", "2000", "--pattern", pattern, "--special", SPECIALS[1],
                "--out", path, corpus)
            pair = Pair(program, path, folder)
            pair.compare("the text itself", text)
            pair.compare("many scripts", SCRIPTS)
            pair.compare("random text", random_text(2, 200000))
            pair.compare("nothing", "")
            special = "".join(random_text(s, 30) + SPECIALS[s % 2] * (s % 3) for s in range(500))
            pair.compare("special tokens", special, allow_special=True)
            borders = os.path.join(folder, pattern + "_borders.json")
            border_tokenizer(borders, path)
            Pair(program, borders, folder).compare("every code point", every_code_point())
            Pair(program, borders, folder).compare("borders in random text", random_text(3, 300000))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
