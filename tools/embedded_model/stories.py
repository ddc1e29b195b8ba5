"""Short stories: a hero, a friend, a plot, told on request and then asked about."""

# Word lists are kept as running text.
# ruff: noqa: SIM905

from dataclasses import dataclass, field
from random import Random

from tools.embedded_model import words
from tools.embedded_model.plots import ENDINGS, HABITS, OPENINGS, PLOTS, Plot
from tools.embedded_model.topic import Exchange, Memory, invented, one
from tools.embedded_model.words import article, capital

SKILLS = "swim|dance|read|sing|cook|paint|skate|climb|whistle|write|jump high|ride a bike".split(
    "|"
)
INSTRUMENTS = "drum flute guitar violin piano bell".split()


@dataclass(slots=True)
class Hero:
    """Someone in a story: a name, what they are, and their pronouns."""

    name: str
    kind: str
    pronouns: list[str]


@dataclass(slots=True)
class Story:
    """A told story in its parts, with questions about it and requests for it."""

    opening: str
    rest: str
    hero: Hero
    friend: Hero
    home: str
    theme: str
    asks: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"{self.opening} {self.rest}"


def _hero(rng: Random, odd: bool = True) -> Hero:
    kind = rng.random()
    girl = rng.random() < 0.5
    human = rng.choice(words.GIRLS if girl else words.BOYS)
    pronouns = words.FEMALE if girl else words.MALE
    if kind < 0.25:
        return Hero(human, "girl" if girl else "boy", pronouns)
    called = rng.choice(words.PET_NAMES) if rng.random() < 0.7 else human
    if kind < 0.75:
        return Hero(called, rng.choice(words.ANIMALS), pronouns)
    if kind < 0.85 and odd:
        noun = rng.choice(words.FANTASY)
        if noun in ("king", "prince", "wizard"):
            girl = False
        if noun in ("queen", "princess"):
            girl = True
        human = rng.choice(words.GIRLS if girl else words.BOYS)
        return Hero(human, noun, words.FEMALE if girl else words.MALE)
    if kind < 0.91:
        return Hero(human, rng.choice(words.JOBS), pronouns)
    if kind < 0.97 or not odd:
        noun = rng.choice(words.THING_HEROES)
        return Hero(called, noun, words.NEUTER)
    return Hero(capital(invented(rng)), invented(rng), pronouns)


def _at(place: str) -> str:
    return f"{words.PLACES[place]} the {place}"


def _fill(template: str, slots: dict[str, str]) -> str:
    return template.format(**slots)


def story(rng: Random) -> Story:
    """A new story."""
    plot: Plot = rng.choice(PLOTS)
    hero, friend = _hero(rng), _hero(rng, odd=False)
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = _hero(rng, odd=False)
    home, place, far = rng.sample(list(words.PLACES), 3)
    thing = rng.choice(words.TREASURES)
    food = rng.choice(words.FOODS)
    trait = rng.choice([t for t in words.TRAITS if t != "hungry" or "hungry" not in plot.themes])
    if hero.kind.startswith(("teddy", "little")):
        hero_phrase = article(hero.kind)
    else:
        hero_phrase = article(f"{trait} {hero.kind}")
    subject, object_, possessive = hero.pronouns
    f_subject, f_object, f_possessive = friend.pronouns
    slots = {
        "N": hero.name, "a_hero": hero_phrase, "kind": hero.kind, "trait": trait,
        "S": capital(subject), "s": subject, "o": object_, "p": possessive,
        "P": capital(possessive),
        "F": friend.name, "fkind": friend.kind, "a_f": article(friend.kind),
        "A_f": capital(article(friend.kind)), "FS": capital(f_subject), "fs": f_subject,
        "fo": f_object, "fp": f_possessive, "FP": capital(f_possessive),
        "home": _at(home), "at": _at(place), "At": capital(_at(place)), "place": place, "far": far,
        "to": f"to the {place}", "thing": thing, "a_thing": article(thing), "food": food,
        "Food": capital(food), "dish": rng.choice(words.DISHES), "colour": rng.choice(
            ("red", "blue", "green", "yellow", "purple", "pink", "white")
        ),
        "day": rng.choice(("morning", "day", "afternoon", "evening", "morning", "day")),
        "weather": rng.choice(words.WEATHERS), "skill": rng.choice(SKILLS),
        "tool": rng.choice(INSTRUMENTS),
    }  # fmt: skip
    slots["dish"] = slots["dish"] if slots["dish"].startswith(("a ", "pan", "bread", "veg", "ho")) \
        else article(slots["dish"])  # fmt: skip
    opening = _fill(rng.choice(OPENINGS), slots)
    parts = [_fill(rng.choice(HABITS), slots)] if rng.random() < 0.5 else []
    parts += [_fill(one(rng, row), slots) for row in plot.rows]
    if rng.random() < 0.85:
        parts.append(_fill(rng.choice(ENDINGS), slots))
    asks = [(_fill(q, slots), _fill(a, slots)) for q, a in plot.asks]
    kind = hero.kind
    asks += [
        (f"What was the {kind}'s name?", f"The {kind}'s name was {hero.name}."),
        (f"What was the name of the {kind}?", f"The {kind}'s name was {hero.name}."),
        (f"Where did {hero.name} live?", f"{hero.name} lived {slots['home']}."),
        (f"Who was {hero.name}?", f"{hero.name} was {article(kind)}."),
        (f"Who was {hero.name}'s friend?", f"{hero.name}'s friend was {friend.name}."),
        ("Who was the story about?", f"The story was about {article(kind)} called {hero.name}."),
    ]
    text = " ".join(parts)
    theme = _fill(one(rng, plot.themes), slots)
    return Story(opening, text, hero, friend, slots["home"], theme, asks)


def _wish(rng: Random, told: Story) -> str:
    """A user's request for this story."""
    hero = told.hero
    about = rng.random()
    if about < 0.12:
        wish = ""
    elif about < 0.42:
        wish = f" about {article(hero.kind)}"
    elif about < 0.6:
        wish = f" about {article(hero.kind)} {one(rng, 'called|named')} {hero.name}"
    elif about < 0.68:
        wish = f" about {article(hero.kind)} and {article(told.friend.kind)}"
    elif about < 0.76:
        wish = f" about {hero.name}"
    elif about < 0.82:
        wish = f" about {hero.name} and {told.friend.name}"
    elif about < 0.9:
        wish = f" about {article(hero.kind)} who lives {told.home}"
    else:
        wish = f" about {told.theme}"
    ask = one(
        rng,
        "Tell me a story|Tell me a story|Tell me a short story|Can you tell me a story|"
        "Please tell me a story|I want to hear a story|I would like a story|A story|Write a story|"
        "Write a short story|Write me a story|Could you tell me a story|Make up a story|"
        "Do you know a story|Please write a short story|tell a story|Give me a story",
    )
    return f"{ask}{wish}{'?' if ask.startswith(('Can', 'Could', 'Do')) else '.'}"


def on_request(rng: Random, memory: Memory) -> list[Exchange]:
    """A story that the user wished for, then often questions about it."""
    told = story(rng)
    turns = [Exchange(_wish(rng, told), told.text)]
    asks = told.asks
    rng.shuffle(asks)
    seen: set[str] = set()
    while asks and rng.random() < 0.5:
        question, answer = asks.pop()
        if answer not in seen:
            turns.append(Exchange(question, answer))
        seen.add(answer)
    if rng.random() < 0.15:
        user = one(
            rng,
            "What a nice story!|I like this story.|That was a good story.|Nice story!|I liked it.|"
            "That is a nice story. Thank you.|Beautiful!",
        )
        answer = one(rng, "Thank you! I am glad you like it.|Thank you! Would you like another?")
        turns.append(Exchange(user, answer))
    if rng.random() < 0.12:
        again = story(rng)
        user = one(
            rng, "Another story, please.|Tell me another one.|Another one!|One more story, please.|"
            "Tell me another story.|Again!|More, please.|One more!"
        )  # fmt: skip
        turns.append(Exchange(user, again.text))
    return turns


def continued(rng: Random, memory: Memory) -> list[Exchange]:
    """The user writes the beginning, the answer continues it."""
    told = story(rng)
    lead = one(rng, "Continue this story: |Go on: |Finish this story: |How does it go on? |")
    return [Exchange(lead + told.opening, told.rest, True)]


def read_aloud(rng: Random, memory: Memory) -> list[Exchange]:
    """The user tells a story and asks about it."""
    told = story(rng)
    question, answer = rng.choice(told.asks)
    lead = one(rng, "Read this story: |Here is a story. |Listen: |")
    return [Exchange(f"{lead}{told.text} {question}", answer, True)]


def offered(rng: Random, memory: Memory) -> list[Exchange]:
    """The model offers a story, and the user accepts or declines."""
    mood = one(
        rng,
        "I am bored.|I'm bored.|I have nothing to do.|I am sad.|I feel sad.|I had a bad day.|"
        "I cannot sleep.|I can't sleep.|Entertain me.",
    )
    lead = "I am sorry to hear that." if "sad" in mood or "bad" in mood else "Let us do something."
    offer = one(rng, "Shall I tell you a story?|Would you like to hear a story?")
    turns = [Exchange(mood, f"{lead} {offer}")]
    if rng.random() < 0.75:
        yes = one(
            rng,
            "Yes|Yes, please.|Yes!|Sure.|OK|Okay.|Yeah|Please do.|Yes, tell me a story.|Why not.",
        )
        turns.append(Exchange(yes, story(rng).text))
    else:
        no = one(rng, "No|No, thank you.|No thanks.|Not now.|Nope")
        turns.append(Exchange(no, "All right. We can talk about something else."))
    return turns


def once_more(rng: Random, memory: Memory) -> list[Exchange]:
    """A story, thanks, the offer of another one, and the answer to that."""
    turns = [Exchange(_wish(rng, told := story(rng)), told.text)]
    liked = one(rng, "What a nice story!|I like this story.|That was nice.|Nice story!|I liked it.")
    turns.append(Exchange(liked, "Thank you! Would you like another?"))
    if rng.random() < 0.7:
        turns.append(Exchange(one(rng, "Yes|Yes, please.|Sure!|OK|Yes!"), story(rng).text))
    else:
        answer = "All right. Tell me if you need anything."
        turns.append(Exchange(one(rng, "No|No, thank you.|Not now.|No thanks"), answer))
    return turns
