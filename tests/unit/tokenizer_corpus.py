"""A corpus that tokenizers find hard, the same on every run: texts of many scripts, every kind of space, mark and
control character, random code points, damaged UTF-8, and the real prose and code that a Debian machine holds."""
import glob
import os
import random
import sysconfig
import unicodedata

SENTENCES = [
    "The quick brown fox doesn't jump over the lazy dog; it's 1,234.56 metres away, isn't it?",
    "I'LL SAY IT'S THEY'RE WE'VE HE'D I'M -- 'tis o'clock's, rock'n'roll 'S 'T 'RE 'LL 'ſ \u2019s",
    "Größe, Übermut, naïve façade, señor, œuvre, İstanbul ıspanak, ŉ ǆ ﬁ ﬂ ﬅ",
    "Ζήτω η ελληνική γλώσσα, ἐν ἀρχῇ ἦν ὁ λόγος",
    "Съешь же ещё этих мягких французских булок, да выпей чаю № 42",
    "نص عربي بالتشكيل: اَلْعَرَبِيَّةُ ١٢٣٤٥ \u200f(RTL)\u200e \u202bembedded\u202c",
    "טקסט עִבְרִי עם נִקּוּד 5784",
    "हिन्दी में लिखा हुआ वाक्य १२३ क्षत्रिय",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓",
    "中文文本没有空格，标点符号是全角的。２０２４年！",
    "日本語のひらがな、カタカナ、漢字、ﾊﾝｶｸ、が が",
    "한국어 문장과 조합형 한글 각 입니다",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ☺️ ❤️‍🔥 1️⃣ 🫠",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘ e\u0301 e\u0323\u0302 \u0344 \u212b \u2126 \u1e9b\u0323",
    "∑ᵢ xᵢ² ≤ ∞ ⅷ ⅓ ① ㊿ ½ ৴ Ⅻ ²³ ₀",
    "\ufeffBOM, soft\u00adhyphen, zero\u200bwidth, word\u2060joiner, non\u200cjoiner, mongolian\u180evowel",
    "private \ue000\uf8ff use, unassigned \u0378\U00050000, nonchar \ufffe\uffff, replacement \ufffd",
    "def f(x):\n\treturn {**x, 'k': [i for i in range(10)]}  # comment\n\n\n\nclass A: pass\n",
    "#include <stdio.h>\r\nint main(void) {\r\n\tprintf(\"%d\\n\", 0x1F);\r\n\r\n    return 0;\r\n}\r\n",
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\dir\\file.txt $HOME ${x} --flag=1 a/b/c",
    "<|im_start|>user\nHi<|im_end|> <|endoftext|><|endoftext|> <|im_end <|begin_of_text|>x",
    "WORDwordWORD word WORD  <keep>  <keep>x\t<strip> \n <strip>\u3000<strip> чай чаи\u0306 чайка Ωmega",
]
SPACES = ("\t\n\x0b\x0c\r \x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
          "\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff")


def pieces(rng):
    """Short strings to build random lines from."""
    words = [w for s in SENTENCES for w in s.split(" ") if w]
    return [
        lambda: rng.choice(words),
        lambda: rng.choice(words)[:: rng.choice([1, -1])],
        lambda: rng.choice(SPACES) * rng.choice([1, 1, 1, 2, 3, 7]),
        lambda: " " * rng.randrange(1, 9),
        lambda: rng.choice(["\n", "\r\n", "\r", "\n\n", " \n", "\n ", "\t"]),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 12))),
        lambda: rng.choice(["'s", "'S", "'ll", "'LL", "'d", "'re", "'Ve", "'m", "'t", "''", "'x", "'ſ", "’s"]),
        lambda: "".join(rng.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") for _ in range(rng.randrange(1, 6))),
        lambda: chr(rng.randrange(0x80)),
        lambda: random_character(rng, 0x3000),
        lambda: random_character(rng),
    ]


def random_character(rng, below=0x110000):
    """Any code point but surrogates and those that this Python's Unicode does not know yet."""
    while True:
        code_point = rng.randrange(min(below, rng.choice([0x800, 0x10000, 0x20000, 0x110000])))
        if unicodedata.category(chr(code_point)) not in ("Cs", "Cn"):
            return chr(code_point)


def real_files():
    """Licence texts, then some Python and Perl sources, in a fixed order and bounded in all."""
    yield from sorted(glob.glob("/usr/share/common-licenses/*"))
    python = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    perl = sorted(glob.glob("/usr/share/perl/5*/**/*.p[ml]", recursive=True))
    yield from python[::5][:30]
    yield from perl[::9][:30]


def read_real(limit_bytes):
    total = 0
    for path in real_files():
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            continue
        total += len(content)
        if total > limit_bytes:
            return
        yield content


def every_assigned_character():
    """Each character that is no ideograph or syllable (those are alike) beside a letter, a digit and a space."""
    line = []
    for code_point in range(0x110000):
        character = chr(code_point)
        many_alike = 0x3400 <= code_point < 0xA000 or 0xAC00 <= code_point < 0xD7A4 or code_point >= 0x17000 and (
            unicodedata.category(character) == "Lo")
        if many_alike or unicodedata.category(character) in ("Cs", "Cn", "Co"):
            continue
        line.append(f"x{character}1 {character}{character}")
        if len(line) == 40:
            yield "".join(line)
            line = []
    yield "".join(line)


def damage(rng, content):
    """Invalid UTF-8: bytes flipped, dropped, cut; overlong forms, surrogates, lone continuation bytes."""
    broken = bytearray(content)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(broken) + 1)
        kind = rng.randrange(3)
        if kind == 0 and at < len(broken):
            broken[at] = rng.randrange(256)
        elif kind == 1 and at < len(broken):
            del broken[at]
        else:
            broken[at:at] = rng.choice([b"\xff", b"\xfe\xff", b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
                                        b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3", bytes([rng.randrange(256)])])
    return bytes(broken)


def records(seed=20240229):
    """All texts, as bytes; most are valid UTF-8."""
    rng = random.Random(seed)
    texts = [b"", b" ", b"\n", b"\r\n", b"\0", b"a\0b\0\0", b"a", b"  a", b"a  "]
    texts += [s.encode() for s in SENTENCES]
    texts += [character.encode() * n for character in SPACES + "a1.中é\u0301'😀" for n in (2, 3, 17, 60, 400)]
    texts += [line.encode() for line in every_assigned_character()]
    makers = pieces(rng)
    for _ in range(5000):
        texts.append("".join(rng.choice(makers)() for _ in range(rng.randrange(1, 30))).encode())
    for _ in range(300):
        texts.append("".join(random_character(rng) for _ in range(rng.randrange(1, 12))).encode())
    valid = list(texts)
    for content in read_real(limit_bytes=1_200_000):
        lines = content.splitlines(keepends=True)
        at = 0
        while at < len(lines):  # lines one by one, and now and then a whole passage
            step = rng.choice([1, 1, 1, 1, 1, 2, 30, 200])
            texts.append(b"".join(lines[at:at + step]))
            at += step
    texts += [damage(rng, rng.choice(valid)) for _ in range(1500)]
    return texts


def training_text():
    """What the small tokenizers learn from."""
    rng = random.Random(7)
    makers = pieces(rng)
    lines = [s for s in SENTENCES for _ in range(20)]
    lines += ["".join(rng.choice(makers)() + " " for _ in range(20)) for _ in range(300)]
    lines += [content.decode(errors="ignore") for content in read_real(limit_bytes=500_000)]
    return lines
