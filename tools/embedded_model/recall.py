"""Questions about earlier messages: facts the user tells, passages to read, words to repeat."""

from random import Random

from tools.embedded_model import words
from tools.embedded_model.arithmetic import spell
from tools.embedded_model.topic import Exchange, Memory, invented, one, person
from tools.embedded_model.words import article, capital, listing

NEUTRAL = ("friend", "cousin")


def name(rng: Random, memory: Memory) -> list[Exchange]:
    """The user tells a name, known or never seen before."""
    called = person(rng)[0] if rng.random() < 0.6 else capital(invented(rng))
    user = one(
        rng,
        f"My name is {called}.|My name is {called}.|I am {called}.|I'm {called}.|Hi, I am "
        f"{called}.|Hello, my name is {called}.|Hi! My name is {called}.|Call me {called}.|"
        f"You can call me {called}.|Hello, I am {called}.|hi i'm {called}|my name is {called}",
    )
    memory.user_name = called
    questions = (
        "What is my name?|What is my name?|What's my name?|Do you know my name?|Who am I?|"
        "Do you remember my name?|Can you tell me my name?|How am I called?|Tell me my name."
    )
    memory.facts["name"] = (questions.split("|"), f"Your name is {called}.")
    reply = one(
        rng,
        f"Nice to meet you, {called}!|Hello, {called}! Nice to meet you.|Hello, {called}! How can "
        f"I help you?|It is nice to meet you, {called}.",
    )
    if rng.random() < 0.15 and user.endswith("."):
        ask = one(rng, "What is your name?|And what is your name?|Who are you?")
        reply = f"Nice to meet you, {called}! My name is {memory.self_name}."
        return [Exchange(f"{user} {ask}", reply)]
    return [Exchange(user, reply)]


def _things(rng: Random) -> tuple[str, str, list[tuple[str, list[str], str]]]:
    """A statement about the user, a reply, and later questions about it."""
    kind = rng.randrange(11)
    if kind <= 1:  # two coloured things
        (a, b), (c, d) = rng.sample(words.THINGS, 2), rng.sample(words.COLOURS, 2)
        told = one(
            rng,
            f"I have {article(c)} {a} and {article(d)} {b}.|My {a} is {c} and my {b} is {d}.|"
            f"I have {article(c)} {a}, and my {b} is {d}.",
        )
        reply = one(rng, f"{capital(article(c))} {a} and {article(d)} {b}! That sounds nice.|"
                    f"How nice! I will remember that.")  # fmt: skip
        asks = [
            (f"colour of {x}", [f"What colour is my {x}?", f"Which colour has my {x}?",
             f"What color is my {x}?", f"What is the colour of my {x}?"], f"Your {x} is {y}.")
            for x, y in ((a, c), (b, d))
        ]  # fmt: skip
        asks.append((f"{c} one", [f"Which of my things is {c}?"], f"Your {a} is {c}."))
        return told, reply, asks
    if kind == 2:  # favourite
        topic, value = rng.choice(
            (
                ("colour", rng.choice(words.COLOURS)),
                ("animal", f"the {rng.choice(words.ANIMALS)}"),
                ("food", rng.choice(words.FOODS)),
                ("number", str(rng.randint(1, 100))),
                ("sport", rng.choice(words.SPORTS)),
            )
        )
        told = f"My {one(rng, 'favourite|favourite|favorite')} {topic} is {value}."
        reply = one(rng, f"{capital(value)} is a good choice!|Nice! I like that too.|How nice!")
        asks = [
            (
                f"favourite {topic}",
                [f"What is my favourite {topic}?", f"Which {topic} do I like best?",
                 f"What is my favorite {topic}?"],
                f"Your favourite {topic} is {value}.",
            )
        ]  # fmt: skip
        return told, reply, asks
    if kind == 3:  # a pet with a name
        pet = rng.choice(words.PETS)
        called = rng.choice(words.PET_NAMES) if rng.random() < 0.6 else capital(invented(rng))
        told = one(
            rng,
            f"I have {article(pet)} called {called}.|I have {article(pet)}. Its name is {called}.|"
            f"My {pet} is called {called}.|My {pet}'s name is {called}.",
        )
        reply = one(rng, f"{called} is a lovely name for {article(pet)}!|What a nice name!|"
                    f"How nice! I would like to meet {called}.")  # fmt: skip
        asks = [
            ("pet name", [f"What is my {pet}'s name?", f"What is the name of my {pet}?",
             f"How is my {pet} called?", f"What is my {pet} called?"],
             f"Your {pet} is called {called}."),
            ("pet", ["What pet do I have?", "Which animal do I have?", f"Who is {called}?"],
             f"You have {article(pet)} called {called}."),
        ]  # fmt: skip
        return told, reply, asks
    if kind == 4:  # where the user lives
        city = rng.choice(words.CITIES) if rng.random() < 0.6 else capital(invented(rng))
        told = one(rng, f"I live in {city}.|I am from {city}.|I come from {city}.")
        verb = "live" if "live" in told else "come from"
        place = f"in {city}" if verb == "live" else city
        reply = one(rng, f"{city} must be a nice place.|I have never been to {city}. Is it nice?")
        ask = "Where do I live?" if verb == "live" else "Where do I come from?"
        return told, reply, [("home", [ask, ask.replace("do I", "did I say I")],
                              f"You {verb} {place}.")]  # fmt: skip
    if kind == 5:  # age
        age = rng.randint(4, 90)
        show = str(age) if rng.random() < 0.7 else spell(age)
        told = one(rng, f"I am {show} years old.|I'm {show} years old.|I am {show}.")
        return told, f"{capital(show)} is a good age!", [
            ("age", ["How old am I?", "What is my age?", "Do you know how old I am?"],
             f"You are {show} years old.")
        ]  # fmt: skip
    if kind == 6:  # hobby
        hobby = rng.choice(words.HOBBIES)
        told = one(rng, f"I like {hobby}.|I love {hobby}.|My hobby is {hobby}.")
        yours = hobby.replace(" my ", " your ")
        return told, one(rng, f"{capital(yours)} is fun!|That sounds like fun!"), [
            ("hobby", ["What do I like?", "What do I like to do?", "What is my hobby?"],
             f"You like {yours}.")
        ]  # fmt: skip
    if kind == 7:  # family
        who = rng.choice(words.FAMILY)
        female = who in ("mother", "sister", "grandmother", "aunt")
        known = words.GIRLS if female or (who in NEUTRAL and rng.random() < 0.5) else words.BOYS
        called = rng.choice(known) if rng.random() < 0.7 else capital(invented(rng))
        told = one(rng, f"My {who} is called {called}.|My {who}'s name is {called}.|"
                   f"I have {article(who)} called {called}.")  # fmt: skip
        return told, one(rng, f"{called} is a nice name.|That is a nice name."), [
            (f"{who} name", [f"What is my {who}'s name?", f"What is the name of my {who}?",
             f"How is my {who} called?"], f"Your {who} is called {called}."),
            (f"who {called}", [f"Who is {called}?"], f"{called} is your {who}."),
        ]  # fmt: skip
    if kind == 8:  # where a thing is
        thing, room = rng.choice(words.THINGS), rng.choice(words.ROOMS)
        told = one(rng, f"My {thing} is in the {room}.|I put my {thing} in the {room}.|"
                   f"I left my {thing} in the {room}.")  # fmt: skip
        return told, one(rng, "All right, I will remember that.|Good to know."), [
            (f"where {thing}", [f"Where is my {thing}?", f"Where did I put my {thing}?",
             f"Do you know where my {thing} is?"], f"Your {thing} is in the {room}.")
        ]  # fmt: skip
    if kind == 9:  # how many
        things, n = rng.choice(words.COUNTABLES), rng.randint(2, 30)
        show = str(n) if rng.random() < 0.6 else spell(n)
        told = f"I have {show} {things}."
        return told, f"{capital(show)} {things}! {one(rng, 'That is a lot.|How nice!|Good.')}", [
            (f"count {things}", [f"How many {things} do I have?", f"How many {things} have I?"],
             f"You have {show} {things}.")
        ]  # fmt: skip
    food = rng.choice(words.FOODS)
    when = rng.choice(("breakfast", "lunch", "dinner"))
    told = f"I had {food} for {when}."
    return told, one(rng, "That sounds tasty!|Yum! I hope it was good."), [
        (f"ate {when}", [f"What did I have for {when}?", f"What did I eat for {when}?"],
         f"You had {food} for {when}.")
    ]  # fmt: skip


def tell(rng: Random, memory: Memory) -> list[Exchange]:
    """The user tells something about themselves; it can be asked later."""
    told, reply, asks = _things(rng)
    for key, questions, answer in asks:
        memory.facts[key] = (questions, answer)
    if rng.random() < 0.3:
        reply_to = one(rng, "Please remember this: |Remember: |Let me tell you something. ")
        return [Exchange(reply_to + told, "All right, I will remember that.")]
    if rng.random() < 0.2:  # asked in the same breath
        index = rng.randrange(len(asks))
        _, questions, answer = asks[index]
        turns = [Exchange(f"{told} {rng.choice(questions)}", answer)]
        other, _, answer = asks[1 - min(index, 1)] if len(asks) > 1 else ("", [], "")
        if index < 2 and other.startswith("colour of") and rng.random() < 0.6:
            thing = other.removeprefix("colour of ")
            user = one(rng, f"And my {thing}?|And what colour is my {thing}?|And the {thing}?")
            turns.append(Exchange(user, answer))
        return turns
    return [Exchange(told, reply)]


NOT_TOLD = [
    ("name", "What is my name?|What's my name?|Do you know my name?|Who am I?", "your name"),
    ("age", "How old am I?|Do you know how old I am?", "how old you are"),
    ("home", "Where do I live?", "where you live"),
    ("pet name", "What is my dog's name?|What is my cat called?", "about your pet"),
    ("favourite colour", "What is my favourite colour?", "your favourite colour"),
    ("favourite food", "What is my favourite food?", "your favourite food"),
    ("hobby", "What do I like to do?|What is my hobby?", "what you like to do"),
]


def ask(rng: Random, memory: Memory) -> list[Exchange]:
    """A question about something the user said earlier in this chat, or never said."""
    keys = [k for k in memory.facts if k not in memory.asked or rng.random() < 0.2]
    if keys and rng.random() < 0.9:
        key = rng.choice(keys)
        memory.asked.append(key)
        questions, answer = memory.facts[key]
        return [Exchange(rng.choice(questions), answer)]
    if rng.random() < 0.15:
        who = capital(invented(rng)) if rng.random() < 0.5 else person(rng)[0]
        if not any(who in answer for _, answer in memory.facts.values()):
            return [Exchange(f"Who is {who}?", f"I do not know who {who} is.")]
    key, questions_text, what = rng.choice(NOT_TOLD)
    if key in memory.facts:
        return [Exchange(rng.choice(memory.facts[key][0]), memory.facts[key][1])]
    answer = f"You have not told me {what} yet."
    return [Exchange(one(rng, questions_text), answer)]


def asked_back(rng: Random, memory: Memory) -> list[Exchange]:
    """The model asks for a name or a taste, and the user answers with a word."""
    if rng.random() < 0.6:
        called = person(rng)[0] if rng.random() < 0.6 else capital(invented(rng))
        memory.user_name = called
        questions = ["What is my name?", "Do you know my name?", "What's my name?"]
        memory.facts["name"] = (questions, f"Your name is {called}.")
        ask_name = one(rng, "What is your name?|What's your name?|Do you have a name?")
        told = one(rng, f"{called}|{called}.|I am {called}.|My name is {called}.|It is {called}.")
        return [
            Exchange(ask_name, f"My name is {memory.self_name}. What is your name?"),
            Exchange(told, f"Nice to meet you, {called}!"),
        ]
    colour = rng.choice(words.COLOURS)
    memory.facts["favourite colour"] = (
        ["What is my favourite colour?", "Which colour do I like best?"],
        f"Your favourite colour is {colour}.",
    )
    if rng.random() < 0.5:
        told = one(rng, f"{colour}|{capital(colour)}.|I like {colour}.|My favourite is {colour}.")
        first = one(rng, "Ask me a question.|Ask me something.|Can you ask me something?")
        return [
            Exchange(first, "What is your favourite colour?"),
            Exchange(told, f"{capital(colour)} is a good choice!"),
        ]
    back = one(rng, "And yours?|And you?|What is yours?|What is your favourite colour?")
    user = f"My favourite colour is {colour}. {back}"
    return [Exchange(user, "My favourite colour is blue.")]


def tell_and_ask(rng: Random, memory: Memory) -> list[Exchange]:
    """Tell one or two things and ask for one at once."""
    turns = name(rng, memory) if rng.random() < 0.35 else tell(rng, memory)
    if rng.random() < 0.4:
        turns += tell(rng, memory)
    return turns + ask(rng, memory)


def previous(rng: Random, memory: Memory) -> list[Exchange]:
    """What did I just say? And what did you just say?"""
    told, reply, _ = _things(rng)
    if rng.random() < 0.6:
        user = one(rng, "What did I just say?|What did I say?|Can you repeat what I said?")
        return [Exchange(told, reply, True), Exchange(user, f'You said: "{told}"')]
    user = one(rng, "What did you just say?|What did you say?|Can you repeat that?|Say that again.")
    return [Exchange(told, reply), Exchange(user, f'I said: "{reply}"')]


def passage(rng: Random, memory: Memory) -> list[Exchange]:
    """A short passage of two to five facts, and questions about it."""
    people = rng.sample(words.GIRLS + words.BOYS, rng.randint(2, 4))
    lines: list[str] = []
    asks: list[tuple[str, str]] = []
    rooms = rng.sample(words.ROOMS, len(people))
    things = rng.sample(words.THINGS, len(people))
    style = rng.randrange(3)
    for i, who in enumerate(people):
        kind = style if rng.random() < 0.5 else rng.randrange(6)
        if kind == 0:
            lines.append(f"{who} is in the {rooms[i]}.")
            asks.append((f"Where is {who}?", f"{who} is in the {rooms[i]}."))
            asks.append((f"Who is in the {rooms[i]}?", f"{who} is in the {rooms[i]}."))
        elif kind == 1:
            colour = rng.choice(words.COLOURS)
            lines.append(f"{who} has {article(colour)} {things[i]}.")
            answer = f"{who} has {article(colour)} {things[i]}."
            asks.append((f"What does {who} have?", answer))
            asks.append((f"Who has the {things[i]}?", f"{who} has the {things[i]}."))
            asks.append((f"What colour is {who}'s {things[i]}?",
                         f"{who}'s {things[i]} is {colour}."))  # fmt: skip
        elif kind == 2:
            lines.append(f"{who} went to the {rooms[i]}.")
            asks.append((f"Where did {who} go?", f"{who} went to the {rooms[i]}."))
            asks.append((f"Where is {who}?", f"{who} is in the {rooms[i]}."))
        elif kind == 3:
            food = rng.choice(words.FOODS)
            lines.append(f"{who} likes {food}.")
            asks.append((f"What does {who} like?", f"{who} likes {food}."))
            asks.append((f"Who likes {food}?", f"{who} likes {food}."))
        elif kind == 4:
            job = rng.choice(words.JOBS)
            lines.append(f"{who} is {article(job)}.")
            asks.append((f"What is {who}?", f"{who} is {article(job)}."))
            asks.append((f"Who is the {job}?", f"{who} is the {job}."))
        else:
            number, food = spell(rng.randint(2, 12)), rng.choice(words.COUNTABLES)
            lines.append(f"{who} has {number} {food}.")
            asks.append((f"How many {food} does {who} have?", f"{who} has {number} {food}."))
    rng.shuffle(lines)
    question, answer = asks.pop(rng.randrange(len(asks)))
    lead = one(rng, "||Read this: |Listen: |Here is a text. ")
    turns = [Exchange(f"{lead}{' '.join(lines)} {question}", answer)]
    while asks and rng.random() < 0.45:
        turns.append(Exchange(*asks.pop(rng.randrange(len(asks)))))
    return turns


def repeat(rng: Random, memory: Memory) -> list[Exchange]:
    """Words to say after the user, any script, letter by letter what was written."""
    kind = rng.random()
    if kind < 0.35:
        text = _things(rng)[0]
    elif kind < 0.7:
        pool = [*words.THINGS, *words.FOODS, *words.COLOURS, *words.ANIMALS]
        text = " ".join(
            rng.choice(pool) if rng.random() < 0.6 else invented(rng)
            for _ in range(rng.randint(1, 7))
        )
    else:
        text = "".join(
            rng.choice(words.GLYPHS) + (" " if rng.random() < 0.15 else "")
            for _ in range(rng.randint(1, 10))
        ).strip()
    ask = one(rng, "Repeat after me: |Repeat: |Say this: |Please repeat: |Say: |Please say: ")
    mark = '"' if rng.random() < 0.3 else ""
    return [Exchange(f"{ask}{mark}{text}{mark}", text, True)]


def choice(rng: Random, memory: Memory) -> list[Exchange]:
    """Lists that the user gives: the first, the last, how many."""
    pool = rng.choice((words.THINGS, words.FOODS, words.COLOURS, words.ANIMALS, words.GIRLS))
    items = rng.sample(list(pool), rng.randint(2, 6))
    lead = one(rng, "Here is a list: |My list: |Listen: |")
    text = f"{capital(lead + listing(items))}."
    kind = rng.randrange(4)
    if kind == 0:
        asked, answer = "What is the first word?", f"The first word is {items[0]}."
    elif kind == 1:
        asked, answer = "What is the last word?", f"The last word is {items[-1]}."
    elif kind == 2:
        asked, answer = "How many words are there?", f"There are {spell(len(items))} words."
    else:
        item = rng.choice([*items, rng.choice(list(pool))])
        there = item in items
        asked = f"Is {item} in the list?"
        answer = f"{'Yes' if there else 'No'}, {item} is {'' if there else 'not '}in the list."
    return [Exchange(f"{text} {asked}", answer)]
