"""Numbers: sums in words and digits, counting, comparing, and small problems told in words."""

# Word lists are kept as running text.
# ruff: noqa: SIM905

from random import Random

from tools.embedded_model import words
from tools.embedded_model.topic import Exchange, Memory, one, person
from tools.embedded_model.words import capital

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()

VERBS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
SYMBOLS = {
    "+": ["+", "+", "plus", "and"],
    "-": ["-", "-", "minus", "take away"],
    "*": ["*", "x", "times", "multiplied by", "\u00d7"],
    "/": ["/", "divided by", "÷", "over"],
}
SPOKEN = {
    "+": ["plus", "plus", "plus", "and", "added to"],
    "-": ["minus", "minus", "minus", "take away"],
    "*": ["times", "times", "multiplied by"],
    "/": ["divided by", "divided by", "shared by"],
}


def spell(n: int) -> str:
    """An integer from -200 to 999 in English words: -4 is minus four, 21 is twenty-one."""
    if n < 0:
        return f"minus {spell(-n)}"
    if n < 20:
        return UNITS[n]
    if n < 100:
        return TENS[n // 10] + (f"-{UNITS[n % 10]}" if n % 10 else "")
    rest = f" and {spell(n % 100)}" if n % 100 else ""
    return f"{UNITS[n // 100]} hundred{rest}"


def digits(n: int) -> str:
    """An integer in digits as the answers say it: -4 is minus 4."""
    return f"minus {-n}" if n < 0 else str(n)


def _operands(rng: Random) -> tuple[str, int, int]:
    """An operation and its operands: mostly 0 to 20, at times to 99; products of 0 to 12."""
    op = rng.choices("+-*/", (38, 30, 24, 8))[0]
    if op == "*":
        return op, rng.randint(0, 12), rng.randint(0, 12)
    if op == "/":
        b = rng.randint(1, 12)
        return op, b * rng.randint(0, 12), b
    if rng.random() < 0.3:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return (op, a, b) if op == "+" else (op, max(a, b), min(a, b))
    return op, rng.randint(0, 20), rng.randint(0, 20)


def result(op: str, a: int, b: int) -> int:
    """The value of ``a op b``; division is exact here."""
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def _ask_sum(rng: Random, expression: str, tight: bool) -> str:
    if tight:
        return one(
            rng,
            f"{expression}|{expression}?|{expression}=|{expression} = ?|What is {expression}?",
            f"What is {expression}?|Whats {expression}?|How much is {expression}?",
            f"Calculate {expression}.|Can you work out {expression}?|{expression} is what?",
        )
    return one(
        rng,
        f"What is {expression}?|What is {expression}?|What is {expression}?|{expression}?",
        f"How much is {expression}?|What does {expression} make?|Can you add up for me: "
        f"{expression}?",
        f"What's {expression}?|Do you know what {expression} is?|Tell me, what is {expression}?",
        f"And {expression}?|And what is {expression}?|Calculate {expression}.",
    )


def sums(rng: Random, memory: Memory) -> list[Exchange]:
    """One to three sums, in words answered in words and in digits answered in digits."""
    return [_sum(rng, memory) for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])]


def _sum(rng: Random, memory: Memory) -> Exchange:
    op, a, b = _operands(rng)
    value = result(op, a, b)
    if rng.random() < 0.5:
        sign = rng.choice(SYMBOLS[op])
        gap = "" if len(sign) == 1 and rng.random() < 0.5 else " "
        user = _ask_sum(rng, f"{a}{gap}{sign}{gap}{b}", tight=True)
        return Exchange(user, f"{digits(a)} {VERBS[op]} {digits(b)} is {digits(value)}.")
    user = capital(_ask_sum(rng, f"{spell(a)} {rng.choice(SPOKEN[op])} {spell(b)}", tight=False))
    return Exchange(user, f"{capital(spell(a))} {VERBS[op]} {spell(b)} is {spell(value)}.")


def chains(rng: Random, memory: Memory) -> list[Exchange]:
    """A sum of three small numbers, answered in two steps."""
    a, b, c = (rng.randint(0, 10) for _ in range(3))
    minus = rng.random() < 0.3 and a + b >= c
    total = a + b - c if minus else a + b + c
    verb = "minus" if minus else "plus"
    if rng.random() < 0.5:
        gap = rng.choice(("", " "))
        user = _ask_sum(rng, f"{a}{gap}+{gap}{b}{gap}{'-' if minus else '+'}{gap}{c}", tight=True)
        return [Exchange(user, f"{a} plus {b} is {a + b}, and {a + b} {verb} {c} is {total}.")]
    user = _ask_sum(rng, f"{spell(a)} plus {spell(b)} {verb} {spell(c)}", tight=False)
    first = f"{capital(spell(a))} plus {spell(b)} is {spell(a + b)}"
    return [
        Exchange(capital(user), f"{first}, and {spell(a + b)} {verb} {spell(c)} is {spell(total)}.")
    ]


def too_big(rng: Random, memory: Memory) -> list[Exchange]:
    """Numbers that this model was never taught: it says so."""
    op = rng.choice("+-**/")
    a, b = rng.randint(150, 99999), rng.randint(13, 9999)
    user = _ask_sum(rng, f"{a} {rng.choice(SYMBOLS[op])} {b}", tight=True)
    answer = one(
        rng,
        "Those numbers are too big for me. I only know small numbers.",
        "That is too hard for me. I can only work with small numbers.",
    )
    return [Exchange(user, answer)]


def zero_division(rng: Random, memory: Memory) -> list[Exchange]:
    """Division by zero and division with a rest."""
    if rng.random() < 0.3:
        a = rng.randint(0, 20)
        user = _ask_sum(rng, f"{a} {rng.choice(SYMBOLS['/'])} 0", tight=True)
        return [Exchange(user, "No number can be divided by zero.")]
    b = rng.randint(2, 10)
    a = b * rng.randint(1, 10) + rng.randint(1, b - 1)
    user = _ask_sum(rng, f"{a} {rng.choice(SYMBOLS['/'])} {b}", tight=True)
    return [Exchange(user, f"{a} divided by {b} is {a // b}, with {a % b} left over.")]


def counting(rng: Random, memory: Memory) -> list[Exchange]:
    """Counting up or down, in words or digits, by ones or by larger steps."""
    in_words = rng.random() < 0.6
    show = spell if in_words else str
    kind = rng.random()
    step = 1
    if kind < 0.35:  # count to n
        start, end = 1, rng.choice((3, 4, 5, 6, 7, 8, 9, 10, 10, 12, 15, 20, 20))
        user = one(
            rng,
            f"Count to {show(end)}.|Can you count to {show(end)}?|Please count to {show(end)}.",
            f"Count up to {show(end)}.|Count from {show(1)} to {show(end)}.|Count to {show(end)}",
        )
    elif kind < 0.7:  # count between
        start = rng.randint(0, 40 if rng.random() < 0.3 else 15)
        end = start + rng.randint(2, 12)
        user = one(
            rng,
            f"Count from {show(start)} to {show(end)}.|Can you count from {show(start)} to "
            f"{show(end)}?|Please count up from {show(start)} to {show(end)}.",
        )
    elif kind < 0.87:  # count down
        start = rng.choice((3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 12, 15, 20))
        end = rng.choice((0, 1, 1, 1, rng.randint(0, start - 2)))
        step = -1
        user = one(
            rng,
            f"Count down from {show(start)} to {show(end)}.|Count backwards from {show(start)} to "
            f"{show(end)}.|Count from {show(start)} down to {show(end)}.|"
            f"Count from {show(start)} to {show(end)}.",
        )
        if end == 1 and rng.random() < 0.6:
            user = one(
                rng,
                f"Count down from {show(start)}.|Count backwards from {show(start)}.|"
                f"Can you count down from {show(start)}?",
            )
    else:  # count by steps
        step = rng.choice((2, 5, 10))
        start, end = step, step * rng.choice((5, 6, 8, 10))
        name = {2: "twos", 5: "fives", 10: "tens"}[step] if in_words else f"{step}s"
        user = one(
            rng,
            f"Count by {name} to {show(end)}.|Count to {show(end)} in {name}.|"
            f"Can you count by {name} up to {show(end)}?",
        )
    numbers = [show(n) for n in range(start, end + (1 if step > 0 else -1), step)]
    return [Exchange(user, capital(", ".join(numbers)) + ".")]


def order(rng: Random, memory: Memory) -> list[Exchange]:
    """Before, after, between, bigger, smaller, even, odd, double and half."""
    show = spell if rng.random() < 0.6 else str
    n, m = rng.sample(range(100 if rng.random() < 0.3 else 21), 2)
    kind = rng.randrange(8)
    if kind == 0:
        user = f"{one(rng, 'What|Which number')} comes after {show(n)}?"
        return [Exchange(user, f"{capital(show(n + 1))} comes after {show(n)}.")]
    if kind == 1:
        user = f"{one(rng, 'What|Which number')} comes before {show(n + 1)}?"
        return [Exchange(user, f"{capital(show(n))} comes before {show(n + 1)}.")]
    if kind == 2:
        user = f"{one(rng, 'What|Which number')} is between {show(n)} and {show(n + 2)}?"
        answer = f"{capital(show(n + 1))} is between {show(n)} and {show(n + 2)}."
        return [Exchange(user, answer)]
    if kind == 3:
        big = rng.random() < 0.5
        word = one(rng, "bigger|larger|greater|more") if big else one(rng, "smaller|less")
        user = one(
            rng,
            f"Which is {word}, {show(n)} or {show(m)}?|What is {word}: {show(n)} or {show(m)}?|"
            f"Which number is {word}, {show(n)} or {show(m)}?",
        )
        low, high = sorted((n, m))
        first, second = (high, low) if big else (low, high)
        told = {"greater": "greater", "larger": "larger", "more": "more", "less": "less"}
        word = told.get(word, "bigger" if big else "smaller")
        return [Exchange(user, f"{capital(show(first))} is {word} than {show(second)}.")]
    if kind == 4:
        user = one(rng, f"Is {show(n)} even or odd?|Is {show(n)} an odd or an even number?")
        return [Exchange(user, f"{capital(show(n))} is {'odd' if n % 2 else 'even'}.")]
    if kind == 5:
        wanted = rng.choice(("bigger", "smaller"))
        right = n > m if wanted == "bigger" else n < m
        user = f"Is {show(n)} {wanted} than {show(m)}?"
        actual = "bigger" if n > m else "smaller"
        yes = "Yes" if right else "No"
        return [Exchange(user, f"{yes}, {show(n)} is {actual} than {show(m)}.")]
    small = n % 21
    if kind == 6:
        user = one(rng, f"What is double {show(small)}?|What is twice {show(small)}?")
        return [Exchange(user, f"Double {show(small)} is {show(2 * small)}.")]
    user = one(rng, f"What is half of {show(2 * small)}?|What is one half of {show(2 * small)}?")
    return [Exchange(user, f"Half of {show(2 * small)} is {show(small)}.")]


def problems(rng: Random, memory: Memory) -> list[Exchange]:
    """A problem told in words: someone has, gets, gives or loses things."""
    name, (subject, _, _) = person(rng)
    other, _ = person(rng)
    things = rng.choice(words.COUNTABLES)
    show = spell if rng.random() < 0.6 else str
    first_person = rng.random() < 0.35
    who, verb, who2 = ("I", "have", "I") if first_person else (name, "has", capital(subject))
    does = "" if first_person else "s"
    have = "do I" if first_person else f"does {name}"
    their = "You have" if first_person else f"{name} has"
    a, b = rng.randint(1, 20), rng.randint(1, 12)

    def noun(n: int) -> str:
        if n != 1:
            return things
        if things.endswith("ies"):
            return "cherry" if things == "cherries" else things[:-3] + "y"
        if things in ("potatoes", "tomatoes"):
            return things[:-2]
        return "peach" if things == "peaches" else things.removesuffix("s")

    if rng.random() < 0.5:
        event = one(
            rng,
            f"{who2} get{does} {show(b)} more|{who2} find{does} {show(b)} more|"
            f"{who2} buy{does} {show(b)} more",
            f"{other} gives {'me' if first_person else name} {show(b)} more",
        )
        total, op = a + b, "plus"
    else:
        a, b = max(a, b), min(a, b)
        event = one(
            rng,
            f"{who2} give{does} {show(b)} to {other}|{who2} lose{does} {show(b)}|"
            f"{who2} give{does} away {show(b)}",
        )
        if things in words.FOODS and rng.random() < 0.35:
            event = f"{who2} eat{does} {show(b)}{rng.choice(('', ' of them'))}"
        total, op = a - b, "minus"
    left = "left" if op == "minus" else "now"
    ask = one(
        rng,
        f"How many {things} {have} have {left}?|How many {things} {have} have?|How many are there "
        f"now?",
    )
    start = f"{who} {verb} {show(a)} {noun(a)}."
    count = "no" if total == 0 and show is spell else show(total)
    told = f"{capital(show(a))} {op} {show(b)} is {show(total)}."
    answer = f"{told} {their} {count} {noun(total)}{' left' if op == 'minus' else ''}."
    return [Exchange(f"{start} {event}. {ask}", answer)]
