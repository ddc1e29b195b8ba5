"""The model's facts: colours, opposites, animals, the calendar, and a few simple facts."""

# Word lists are kept as running text.
# ruff: noqa: E501, SIM905

from random import Random

from tools.embedded_model.arithmetic import ORDINALS, spell
from tools.embedded_model.topic import Exchange, Memory, invented, one
from tools.embedded_model.words import ANIMALS, FOODS, article, capital, listing

COLOUR_OF = {
    "the sky": "blue",
    "the sea": "blue",
    "grass": "green",
    "a leaf": "green",
    "a frog": "green",
    "a banana": "yellow",
    "the sun": "yellow",
    "a lemon": "yellow",
    "snow": "white",
    "milk": "white",
    "salt": "white",
    "a polar bear": "white",
    "coal": "black",
    "the night": "black",
    "a crow": "black",
    "blood": "red",
    "a strawberry": "red",
    "a tomato": "red",
    "a cherry": "red",
    "a fire engine": "red",
    "a carrot": "orange",
    "an orange": "orange",
    "a pumpkin": "orange",
    "a fox": "red",
    "a pig": "pink",
    "a flamingo": "pink",
    "chocolate": "brown",
    "wood": "brown",
    "a bear": "brown",
    "earth": "brown",
    "an elephant": "grey",
    "a mouse": "grey",
    "a stone": "grey",
    "a plum": "purple",
    "an aubergine": "purple",
    "a grape": "purple",
    "a cucumber": "green",
    "a pea": "green",
    "corn": "yellow",
    "a swan": "white",
    "a cloud": "white",
    "butter": "yellow",
    "a rose": "red",
    "a chick": "yellow",
    "coffee": "brown",
    "paper": "white",
}
MIXES = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
}
OPPOSITES = [
    pair.split("/")
    for pair in (
        "hot/cold big/small up/down day/night black/white happy/sad fast/slow old/young open/closed "
        "left/right full/empty hard/soft high/low in/out light/dark long/short loud/quiet near/far "
        "new/old rich/poor right/wrong strong/weak tall/short thick/thin true/false warm/cool "
        "wet/dry wide/narrow good/bad clean/dirty early/late easy/difficult first/last start/end "
        "yes/no push/pull win/lose love/hate buy/sell come/go give/take laugh/cry sink/float "
        "sit/stand sweet/sour top/bottom front/back before/after above/below inside/outside "
        "always/never more/less many/few heavy/light brave/afraid awake/asleep alive/dead "
        "sharp/blunt smooth/rough deep/shallow safe/dangerous kind/cruel find/lose "
        "remember/forget begin/finish arrive/leave summer/winter morning/evening north/south "
        "east/west boy/girl man/woman king/queen sun/moon friend/enemy question/answer "
        "beautiful/ugly cheap/expensive clever/foolish simple/complicated on/off "
        "raise/lower war/peace hello/goodbye here/there large/little"
    ).split()
]
SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "sheep": "baa",
    "pig": "oink",
    "duck": "quack",
    "horse": "neigh",
    "hen": "cluck",
    "lion": "roar",
    "frog": "ribbit",
    "owl": "hoot",
    "bee": "buzz",
    "snake": "hiss",
    "mouse": "squeak",
    "donkey": "hee-haw",
    "crow": "caw",
    "wolf": "howl",
    "rooster": "cock-a-doodle-doo",
    "bird": "tweet",
    "turkey": "gobble",
}
YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "sheep": "lamb",
    "pig": "piglet",
    "duck": "duckling",
    "horse": "foal",
    "hen": "chick",
    "lion": "cub",
    "bear": "cub",
    "goat": "kid",
    "deer": "fawn",
    "frog": "tadpole",
    "swan": "cygnet",
    "goose": "gosling",
}
HOMES = {
    "bird": "in a nest",
    "bee": "in a hive",
    "dog": "in a kennel",
    "horse": "in a stable",
    "fox": "in a den",
    "fish": "in the water",
    "rabbit": "in a burrow",
    "spider": "in a web",
    "bear": "in a cave",
    "cow": "in a barn",
    "whale": "in the sea",
    "camel": "in the desert",
    "penguin": "in the cold south",
    "monkey": "in the trees",
    "frog": "by the pond",
    "squirrel": "in a tree",
    "mole": "under the ground",
    "lion": "on the savanna",
    "pig": "in a sty",
}
EATS = {
    "rabbit": "carrots and grass",
    "cow": "grass",
    "horse": "hay and grass",
    "monkey": "bananas and other fruit",
    "mouse": "seeds and cheese",
    "lion": "meat",
    "squirrel": "nuts",
    "bear": "berries, fish and honey",
    "panda": "bamboo",
    "cat": "fish and meat",
    "owl": "mice",
    "frog": "flies",
    "hen": "corn",
    "sheep": "grass",
    "penguin": "fish",
    "dog": "meat and bones",
}
LEGS = {
    "dog": 4, "cat": 4, "horse": 4, "cow": 4, "spider": 8, "bird": 2, "hen": 2, "ant": 6, "bee": 6,
    "fish": 0, "snake": 0, "elephant": 4, "duck": 2, "butterfly": 6, "sheep": 4, "crab": 10,
    "octopus": 8, "person": 2, "frog": 4, "mouse": 4, "chair": 4, "snail": 0, "lion": 4, "pig": 4,
}  # fmt: skip
LEG_WORDS = {0: "no", 2: "two", 4: "four", 6: "six", 8: "eight", 10: "ten"}
CAN_FLY = {"bird", "owl", "bee", "crow", "parrot", "butterfly", "swan", "duck", "bat", "eagle"}
CAN_SWIM = {"fish", "whale", "dolphin", "duck", "frog", "penguin", "otter", "beaver", "swan"}
GROUPS = {
    "animal": [*ANIMALS, "snake", "panda", "camel", "goose", "eagle"],
    "fruit": "apple pear plum cherry banana orange lemon grape peach strawberry melon".split(),
    "vegetable": "carrot potato onion cabbage pea cucumber pumpkin leek bean spinach".split(),
    "colour": "red blue green yellow orange purple pink brown black white grey".split(),
    "tool": "hammer saw spade rake drill ladder axe screwdriver".split(),
    "drink": "water milk tea juice coffee lemonade".split(),
    "flower": "rose daisy tulip lily sunflower violet poppy".split(),
    "bird": "owl crow swan parrot penguin hen duck eagle robin sparrow".split(),
    "instrument": "drum piano guitar flute violin trumpet bell".split(),
    "shape": "circle square triangle rectangle star oval".split(),
    "country": "France Italy Spain Japan Egypt Canada Brazil India Kenya Norway".split(),
}
NOT_A = ("colour", "country", "drink", "shape")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
SEASONS = "spring summer autumn winter".split()
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "England": "London",
    "Portugal": "Lisbon",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Poland": "Warsaw",
    "Canada": "Ottawa",
    "India": "New Delhi",
    "Kenya": "Nairobi",
    "Hungary": "Budapest",
    "Denmark": "Copenhagen",
    "the United States": "Washington",
    "the United Kingdom": "London",
}
USES = {
    "a spoon": "eat soup",
    "a key": "open a door",
    "a pencil": "write and draw",
    "scissors": "cut paper",
    "an umbrella": "stay dry in the rain",
    "a bed": "sleep",
    "a cup": "drink",
    "soap": "wash your hands",
    "a book": "read",
    "a lamp": "make light",
    "a clock": "tell the time",
    "a map": "find the way",
    "a boat": "cross the water",
    "a knife": "cut bread",
    "a hammer": "hit nails",
    "a chair": "sit",
    "a kite": "play in the wind",
    "a broom": "sweep the floor",
    "a needle": "sew",
    "a towel": "dry yourself",
    "your eyes": "see",
    "your ears": "hear",
    "your nose": "smell",
    "your feet": "walk",
    "your hands": "hold things",
    "your tongue": "taste",
    "your teeth": "bite and chew",
}
# Question variants, divided by a bar, with the answer.
SIMPLE = {
    "How many days are in a week?|How many days does a week have?": "A week has seven days.",
    "How many months are in a year?|How many months does a year have?": "A year has twelve months.",
    "How many hours are in a day?|How many hours does a day have?": "A day has 24 hours.",
    "How many minutes are in an hour?": "An hour has 60 minutes.",
    "How many seconds are in a minute?": "A minute has 60 seconds.",
    "How many days are in a year?": "A year has 365 days.",
    "How many seasons are there?|How many seasons are in a year?": "There are four seasons.",
    "What are the seasons?|Name the four seasons.|Name the seasons.": (
        "The four seasons are spring, summer, autumn and winter."
    ),
    "What are the days of the week?|Name the days of the week.|List the days of the week.|"
    "Tell me the days of the week.": f"The days of the week are {listing(DAYS)}.",
    "What are the months of the year?|Name the months.|List the months of the year.|"
    "Tell me the months.": f"The months of the year are {listing(MONTHS)}.",
    "How many sides does a triangle have?": "A triangle has three sides.",
    "How many sides does a square have?": "A square has four sides.",
    "How many corners does a square have?": "A square has four corners.",
    "How many fingers do you have on one hand?|How many fingers are on a hand?": (
        "A hand has five fingers."
    ),
    "How many eyes does a person have?|How many eyes do people have?": "A person has two eyes.",
    "How many wheels does a car have?": "A car has four wheels.",
    "How many wheels does a bicycle have?|How many wheels does a bike have?": (
        "A bicycle has two wheels."
    ),
    "What shape is a ball?|What shape is the sun?": "It is round.",
    "What do bees make?": "Bees make honey.",
    "What do cows give us?|Where does milk come from?": "Cows give us milk.",
    "What do hens lay?|Where do eggs come from?": "Hens lay eggs.",
    "What is ice made of?|What is ice?": "Ice is frozen water.",
    "What is snow?|What is snow made of?": "Snow is made of tiny bits of ice.",
    "What is rain?|What is rain made of?": "Rain is water that falls from the clouds.",
    "What is bread made of?|What is bread made from?": "Bread is made of flour and water.",
    "What is cheese made of?|What is cheese made from?": "Cheese is made from milk.",
    "What is a table made of?|What is paper made of?": "It is made of wood.",
    "What is a window made of?": "A window is made of glass.",
    "When does the sun rise?|When does the sun come up?": "The sun rises in the morning.",
    "When does the sun set?|When does the sun go down?": "The sun sets in the evening.",
    "Where does the sun rise?": "The sun rises in the east.",
    "Where does the sun set?": "The sun sets in the west.",
    "What can you see in the sky at night?|What shines at night?": (
        "At night you can see the moon and the stars."
    ),
    "What is the first month of the year?": "The first month of the year is January.",
    "What is the last month of the year?": "The last month of the year is December.",
    "What is the first day of the week?": "The first day of the week is Monday.",
    "What is the last day of the week?": "The last day of the week is Sunday.",
    "What is the biggest animal?|What is the largest animal?": "The biggest animal is the whale.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "What is the fastest animal on land?|What is the fastest animal?": (
        "The fastest animal on land is the cheetah."
    ),
    "What is the smallest number?|Where do numbers start?": "We start counting with zero or one.",
    "How many letters are in the alphabet?": "The alphabet has 26 letters.",
    "Say the alphabet.|What is the alphabet?|Tell me the alphabet.|Can you say the alphabet?": (
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z."
    ),
    "What is the first letter of the alphabet?": "The first letter is A.",
    "What is the last letter of the alphabet?": "The last letter is Z.",
    "What do we breathe?": "We breathe air.",
    "What do plants need?|What does a plant need to grow?": "A plant needs water, light and earth.",
    "Is the sun hot or cold?|Is the sun hot?": "The sun is very hot.",
    "Is ice hot or cold?|Is ice cold?": "Ice is cold.",
    "Is fire hot or cold?|Is fire hot?": "Fire is hot.",
    "Is water wet or dry?|Is water wet?": "Water is wet.",
    "What colours are in the rainbow?|What are the colours of the rainbow?|"
    "Name the colours of the rainbow.": (
        "The rainbow is red, orange, yellow, green, blue and purple."
    ),
    "What colour is a zebra?|What colours does a zebra have?": "A zebra is black and white.",
    "What colour is a panda?": "A panda is black and white.",
    "What colour is an apple?": "An apple is red or green.",
    "What colour is a traffic light?": "A traffic light is red, yellow or green.",
    "When is it cold?|When does it snow?": "It is cold and it snows in winter.",
    "When is it warm?|When is it hot outside?": "It is warm in summer.",
    "When do the leaves fall?": "The leaves fall in autumn.",
    "When do flowers grow?|When do the flowers bloom?": "Flowers grow in spring.",
    "What planet do we live on?|Where do people live?": "We live on the Earth.",
    "What goes around the Earth?": "The moon goes around the Earth.",
    "Why is the sky blue?": "The sky is blue because the air scatters the blue light of the sun.",
    "Why is grass green?|Why are leaves green?": (
        "Leaves are green because of the green stuff that catches the light of the sun."
    ),
    "Why do we sleep?|Why do people sleep?": "We sleep so that our body can rest.",
    "Why do we eat?|Why do people eat?": "We eat because food gives us strength.",
    "Why does it rain?|Where does rain come from?": "It rains when clouds are full of water.",
    "Why is snow white?|Why is snow cold?": "Because snow is made of tiny bits of ice.",
    "What is a rainbow?|How is a rainbow made?": (
        "A rainbow is sunlight that shines through drops of rain."
    ),
    "What is the sun?": "The sun is a star. It gives us light and warmth.",
    "What is the moon?": "The moon is a round rock that goes around the Earth.",
    "What is a star?|What are stars?": "A star is a sun that is very far away.",
    "What is a week?": "A week is seven days long.",
    "What is a year?": "A year is twelve months long.",
    "What is a story?": "A story tells what happened to someone.",
    "What is a word?": "A word is made of letters and means something.",
    "What is a number?": "A number tells how many things there are.",
    "What is a friend?": "A friend is someone who likes you and helps you.",
    "What is a computer?": "A computer is a machine that works with numbers and words.",
    "What is a robot?": "A robot is a machine that can move and do work.",
    "What is a house?": "A house is a place where people live.",
    "What is a school?": "A school is a place where children learn.",
    "What is a book?": "A book has many pages with words to read.",
    "What is wind?|What is the wind?": "Wind is air that moves.",
    "What is honey?": "Honey is a sweet food that bees make.",
    "What is a dragon?": "A dragon is an animal in stories. It breathes fire.",
}
RHYMES = [
    group.split()
    for group in (
        "cat hat mat bat rat",
        "dog frog log fog",
        "house mouse",
        "tree bee see me free",
        "moon spoon soon balloon",
        "star car far jar",
        "ring king sing wing",
        "ball tall wall fall",
        "cake lake snake make",
        "boat coat goat",
        "light night kite right",
        "bed red head bread",
        "sun fun run bun",
        "day play say way",
        "fox box socks",
        "book cook look hook",
        "rain train plane",
        "pear bear chair hair",
        "snow go know low",
        "hen ten pen men",
    )
]


def _colour_word(rng: Random) -> str:
    return "color" if rng.random() < 0.3 else "colour"


def colours(rng: Random, memory: Memory) -> list[Exchange]:
    """What colour a thing is, what two colours make, and things of a colour."""
    kind, colour = rng.random(), _colour_word(rng)
    if rng.random() < 0.05:
        thing = article(invented(rng))
        return [Exchange(f"What {colour} is {thing}?", f"I do not know what colour {thing} is.")]
    if kind < 0.6:
        thing, shade = rng.choice(list(COLOUR_OF.items()))
        if rng.random() < 0.2:
            guess = rng.choice([*GROUPS["colour"], shade, shade, shade, shade])
            yes = "Yes" if guess == shade else "No"
            return [Exchange(f"Is {thing} {guess}?", f"{yes}, {thing} is {shade}.")]
        plural = {"scissors": "are"}.get(thing, "is")
        user = one(
            rng,
            f"What {colour} {plural} {thing}?|What {colour} {plural} {thing}?|"
            f"Which {colour} does {thing} have?|Tell me the {colour} of {thing}.|"
            f"Do you know what {colour} {thing} is?|What is the {colour} of {thing}?",
        )
        return [Exchange(user, f"{capital(thing)} is {shade}.")]
    if kind < 0.82:
        (a, b), shade = rng.choice(list(MIXES.items()))
        if rng.random() < 0.5:
            a, b = b, a
        user = one(
            rng,
            f"What {colour} do you get when you mix {a} and {b}?|What do {a} and {b} make?|"
            f"What do you get if you mix {a} with {b}?|Mix {a} and {b}.|"
            f"What {colour} do {a} and {b} make?|What is {a} mixed with {b}?",
        )
        return [Exchange(user, f"{capital(a)} and {b} make {shade}.")]
    shade = rng.choice(["red", "blue", "green", "yellow", "white", "brown", "orange"])
    known = [t for t, c in COLOUR_OF.items() if c == shade]
    n = min(len(known), rng.choice((1, 2, 3)))
    count = ("", "one", "two", "three")[n]
    user = one(
        rng,
        f"Name {count} {shade} thing{'s' if n > 1 else ''}.",
        f"Tell me {count} thing{'s' if n > 1 else ''} that {'are' if n > 1 else 'is'} {shade}.",
        f"What is {shade}?" if n == 1 else f"Can you name {count} {shade} things?",
    )
    chosen = rng.sample(known, n)
    verb = "are" if n > 1 else "is"
    return [Exchange(user, f"{capital(listing(chosen))} {verb} {shade}.")]


def opposites(rng: Random, memory: Memory) -> list[Exchange]:
    """Opposites, one to three in a row; later questions are short."""
    turns = []
    if rng.random() < 0.04:
        word = invented(rng)
        user = f"What is the opposite of {word}?"
        return [Exchange(user, f"I do not know the opposite of {word}.")]
    for i in range(rng.choices((1, 2, 3), (6, 3, 1))[0]):
        word, other = _opposite(rng)
        user = one(
            rng,
            f"What is the opposite of {word}?|What is the opposite of {word}?|"
            f"What's the opposite of {word}?|The opposite of {word}?|Opposite of {word}?|"
            f"Tell me the opposite of {word}.|Can you tell me the opposite of {word}?|"
            f"Do you know the opposite of {word}?|Give me the opposite of {word}.",
        )
        if i:
            user = one(rng, f"And of {word}?|And the opposite of {word}?|{user}")
        turns.append(Exchange(user, f"The opposite of {word} is {other}."))
    return turns


def _opposite(rng: Random) -> tuple[str, str]:
    """A word and its opposite; a word in several pairs keeps its first."""
    first: dict[str, str] = {}
    for a, b in OPPOSITES:
        first.setdefault(a, b)
        first.setdefault(b, a)
    return rng.choice(list(first.items()))


def animals(rng: Random, memory: Memory) -> list[Exchange]:
    """Sounds, young, homes, food, legs and skills of animals."""
    kind = rng.randrange(8)
    if kind <= 1:
        animal, sound = rng.choice(list(SOUNDS.items()))
        if rng.random() < 0.25:
            user = one(
                rng, f"Which animal says {sound}?|What animal says {sound}?|Who says {sound}?"
            )
            return [Exchange(user, f"{capital(article(animal))} says {sound}.")]
        user = one(
            rng,
            f"What sound does {article(animal)} make?|What does {article(animal)} say?|"
            f"What does the {animal} say?|What noise does {article(animal)} make?",
        )
        return [Exchange(user, f"{capital(article(animal))} says {sound}.")]
    if kind == 2:
        animal, young = rng.choice(list(YOUNG.items()))
        user = one(
            rng,
            f"What is a baby {animal} called?|What do you call a baby {animal}?|"
            f"What is the name for a young {animal}?",
        )
        return [Exchange(user, f"A baby {animal} is called {article(young)}.")]
    if kind == 3:
        animal, home = rng.choice(list(HOMES.items()))
        user = one(
            rng, f"Where does {article(animal)} live?|Where do {_plural(animal)} live?|"
            f"Where does the {animal} sleep?"
        )  # fmt: skip
        return [Exchange(user, f"{capital(article(animal))} lives {home}.")]
    if kind == 4:
        animal, food = rng.choice(list(EATS.items()))
        user = one(rng, f"What does {article(animal)} eat?|What do {_plural(animal)} eat?")
        return [Exchange(user, f"{capital(article(animal))} eats {food}.")]
    if kind == 5:
        animal, legs = rng.choice(list(LEGS.items()))
        user = one(
            rng,
            f"How many legs does {article(animal)} have?|How many legs does the {animal} have?|"
            f"How many legs do {_plural(animal)} have?",
        )
        return [Exchange(user, f"{capital(article(animal))} has {LEG_WORDS[legs]} legs.")]
    skill, able = rng.choice((("fly", CAN_FLY), ("swim", CAN_SWIM)))
    unable = "cow horse elephant snail pig sheep goat mole hen cat".split()
    if skill == "fly":
        unable += ["fish", "whale", "dog", "frog", "mouse", "penguin"]
    yes = rng.random() < 0.5
    animal = rng.choice(sorted(able) if yes else unable)
    if not yes and skill == "swim":
        animal = rng.choice(("hen", "snail", "butterfly", "mole"))
    user = one(rng, f"Can {article(animal)} {skill}?|Can {_plural(animal)} {skill}?")
    able_word = f"Yes, {article(animal)} can {skill}." if yes else (
        f"No, {article(animal)} cannot {skill}."
    )  # fmt: skip
    return [Exchange(user, able_word)]


def _plural(noun: str) -> str:
    irregular = {
        "mouse": "mice", "fish": "fish", "sheep": "sheep", "wolf": "wolves", "deer": "deer",
        "goose": "geese", "person": "people", "butterfly": "butterflies", "fox": "foxes",
        "ostrich": "ostriches", "octopus": "octopuses",
    }  # fmt: skip
    return irregular.get(noun, f"{noun}s")


def calendar(rng: Random, memory: Memory) -> list[Exchange]:
    """Days, months and seasons: what comes before, after and between."""
    names, unit = rng.choice(((DAYS, "day"), (DAYS, "day"), (MONTHS, "month"), (SEASONS, "season")))
    i = rng.randrange(len(names))
    before, here, after = names[i - 1], names[i], names[(i + 1) % len(names)]
    kind = rng.randrange(5)
    what = one(rng, f"What|What {unit}|Which {unit}")
    if kind == 0:
        user = f"{what} {one(rng, 'comes after|is after|follows')} {here}?"
        return [Exchange(user, f"{capital(after)} comes after {here}.")]
    if kind == 1:
        user = f"{what} {one(rng, 'comes before|is before')} {here}?"
        return [Exchange(user, f"{capital(before)} comes before {here}.")]
    if kind == 2:
        user = f"{what} is between {before} and {after}?"
        return [Exchange(user, f"{capital(here)} is between {before} and {after}.")]
    if kind == 3 and unit == "day":
        if rng.random() < 0.5:
            user = one(rng, f"If today is {here}, what day is tomorrow?|Today is {here}. What day is "
                       f"tomorrow?|Today is {here}. Which day is it tomorrow?")  # fmt: skip
            return [Exchange(user, f"If today is {here}, tomorrow is {after}.")]
        user = one(rng, f"If today is {here}, what day was yesterday?|Today is {here}. What day was "
                   f"it yesterday?")  # fmt: skip
        return [Exchange(user, f"If today is {here}, yesterday was {before}.")]
    if unit == "season":
        weather = {"spring": "mild", "summer": "warm", "autumn": "cool", "winter": "cold"}[here]
        user = one(rng, f"What is the weather like in {here}?|Is it warm or cold in {here}?")
        return [Exchange(user, f"In {here} it is {weather}.")]
    place = i + 1
    if place > len(ORDINALS):
        place, here = 1, names[0]
    span = "week" if unit == "day" else "year"
    user = f"What is the {ORDINALS[place - 1]} {unit} of the {span}?"
    return [Exchange(user, f"The {ORDINALS[place - 1]} {unit} of the {span} is {here}.")]


def simple(rng: Random, memory: Memory) -> list[Exchange]:
    """Facts that stand alone."""
    question, answer = rng.choice(list(SIMPLE.items()))
    user = rng.choice(question.split("|"))
    if rng.random() < 0.3:
        user = user.replace("colour", "color")
    if "table" in question:
        answer = "A table is made of wood." if "table" in user else "Paper is made of wood."
    if "shape is" in question:
        answer = "A ball is round." if "ball" in user else "The sun is round."
    return [Exchange(user, answer)]


def capitals(rng: Random, memory: Memory) -> list[Exchange]:
    """Capitals of some countries, asked both ways; not every country is known."""
    if rng.random() < 0.08:
        land = capital(invented(rng))
        answer = f"I do not know the capital of {land}."
        return [Exchange(f"What is the capital of {land}?", answer)]
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.3 and city != "London":
        user = one(rng, f"Where is {city}?|In which country is {city}?|What country is {city} in?")
        return [Exchange(user, f"{city} is in {country}.")]
    user = one(
        rng,
        f"What is the capital of {country}?|What is the capital of {country}?|Capital of "
        f"{country}?|What's the capital city of {country}?|Tell me the capital of {country}.",
    )
    return [Exchange(user, f"The capital of {country} is {city}.")]


def uses(rng: Random, memory: Memory) -> list[Exchange]:
    """The use of a thing, and the thing for a use."""
    thing, use = rng.choice(list(USES.items()))
    many = thing == "scissors" or (thing.startswith("your ") and thing.endswith(("s", "t", "h")))
    many = many and thing != "your nose"
    if rng.random() < 0.35:
        return [Exchange(f"What do you need to {use}?", f"You need {thing} to {use}.")]
    user = one(
        rng,
        f"What do you do with {thing}?|What {'are' if many else 'is'} {thing} for?|"
        f"What can you do with {thing}?|Why do we need {thing}?",
    )
    return [Exchange(user, f"With {thing} you can {use}.")]


def groups(rng: Random, memory: Memory) -> list[Exchange]:
    """Members of a group, and the group of a thing."""
    group = rng.choice(list(GROUPS))
    plural = {"fruit": "fruits", "country": "countries"}.get(group, f"{group}s")
    members = GROUPS[group]
    if rng.random() < 0.6:
        n = rng.choice((1, 2, 3, 3, 4, 5))
        chosen = rng.sample(members, n)
        if n == 1:
            shown = chosen[0] if group in NOT_A else article(chosen[0])
            user = one(rng, f"Name {article(group)}.|Tell me {article(group)}.|Name one {group}.")
            return [Exchange(user, f"{capital(shown)} is {article(group)}.")]
        count = ("", "", "two", "three", "four", "five")[n]
        if rng.random() < 0.3:
            count = str(n)
        user = one(
            rng,
            f"Name {count} {plural}.|Tell me {count} {plural}.|Can you name {count} {plural}?|"
            f"List {count} {plural}.|Give me {count} {plural}.",
        )
        return [Exchange(user, f"Here are {count} {plural}: {listing(chosen)}.")]
    member = rng.choice(members)
    shown = member if group in NOT_A else article(member)
    if rng.random() < 0.5:
        return [Exchange(f"What is {shown}?", f"{capital(shown)} is {article(group)}.")]
    other = rng.choice([g for g in GROUPS if member not in GROUPS[g]])
    if rng.random() < 0.5:
        return [Exchange(f"Is {shown} {article(group)}?", f"Yes, {shown} is {article(group)}.")]
    answer = f"No, {shown} is {article(group)}."
    return [Exchange(f"Is {shown} {article(other)}?", answer)]


def rhymes(rng: Random, memory: Memory) -> list[Exchange]:
    """Words that rhyme."""
    group = rng.choice(RHYMES)
    a = rng.choice(group)
    b = group[(group.index(a) + 1) % len(group)]
    user = one(
        rng,
        f"What rhymes with {a}?|Which word rhymes with {a}?|Tell me a word that rhymes with {a}.|"
        f"Find a rhyme for {a}.",
    )
    return [Exchange(user, f"{capital(b)} rhymes with {a}.")]


SIZES_OF = (
    "ant bee mouse frog hen cat dog sheep horse cow elephant whale house hill mountain".split()
)


def comparing(rng: Random, memory: Memory) -> list[Exchange]:
    """Which of two animals is bigger, smaller."""
    i, j = sorted(rng.sample(range(len(SIZES_OF)), 2))
    small, big = article(SIZES_OF[i]), article(SIZES_OF[j])
    first, second = (small, big) if rng.random() < 0.5 else (big, small)
    word = rng.choice(("bigger", "smaller"))
    winner, loser = (big, small) if word == "bigger" else (small, big)
    if rng.random() < 0.3:
        yes = first == winner
        actual = word if yes else ("smaller" if word == "bigger" else "bigger")
        answer = f"{'Yes' if yes else 'No'}, {first} is {actual} than {second}."
        return [Exchange(f"Is {first} {word} than {second}?", answer)]
    user = one(
        rng,
        f"Which is {word}, {first} or {second}?|What is {word}: {first} or {second}?|"
        f"What is {word}, {first} or {second}?",
    )
    return [Exchange(user, f"{capital(winner)} is {word} than {loser}.")]


def spelling(rng: Random, memory: Memory) -> list[Exchange]:
    """A word letter by letter, and its first or last letter."""
    pool = [*ANIMALS, *FOODS, *GROUPS["colour"], *GROUPS["fruit"], *GROUPS["instrument"]]
    word = rng.choice(pool)
    kind = rng.randrange(4)
    if kind <= 1:
        user = one(
            rng,
            f"Spell {word}.|How do you spell {word}?|Can you spell {word}?|Spell the word {word}.",
        )
        return [Exchange(user, f"{', '.join(word.upper())}.")]
    if kind == 2:
        answer = f"{capital(word)} starts with {word[0].upper()}."
        user = one(rng, f"What letter does {word} start with?|What is the first letter of {word}?")
        return [Exchange(user, answer)]
    user = one(rng, f"How many letters does {word} have?|How many letters are in {word}?")
    letters = [c for c in word if c.isalpha()]
    return [Exchange(user, f"{capital(word)} has {spell(len(letters))} letters.")]


PROSE_SKIPS = ("Yes", "No", "It is", "Here", "If", "With", "I ", "We ", "Because")


def prose(rng: Random) -> str:
    """A paragraph of facts without any question, for plain completion."""
    makers = (colours, opposites, animals, calendar, simple, capitals, comparing, groups)
    lines = []
    for _ in range(rng.randint(4, 12)):
        answer = rng.choice(makers)(rng, Memory())[0].assistant
        if not answer.startswith(PROSE_SKIPS):
            lines.append(answer)
    return " ".join(lines)
