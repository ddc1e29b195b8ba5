"""The vocabulary of the small world: names, animals, places, things, and what goes with what."""

# Word lists are kept as running text.
# ruff: noqa: E501, SIM905

GIRLS = (
    "Mia Anna Lily Emma Ella Sara Nora Lucy Zoe Ruby Rosa Clara Ida Maya Ivy Alice Grace Jane Kate "
    "Lena Mary Nina Olga Paula Rita Sally Tina Vera Wendy Amy Bella Daisy Eva Fiona Hana Iris Julia "
    "Kira Lola Molly Polly Rosie Sofia Tara Uma Zara Leila Amina Mei Yuki Priya Zoë Renée Chloé"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Jack Tim Dan Finn Noah Paul Peter Hugo Oscar Adam Bob Carl David Eric Fred "
    "George Harry Ian John Kevin Luke Mark Nick Oliver Pablo Ralph Simon Theo Victor Will Alex Bruno "
    "Charlie Dylan Felix Henry Jonas Liam Milo Otto Toby Omar Ali Kenji Ravi Ivan José Björn André"
).split()
PET_NAMES = (
    "Rusty Pip Biscuit Button Pepper Socks Shadow Coco Rex Spot Bubbles Fluffy Ginger Hazel Honey "
    "Jumper Kiki Lucky Misty Nibbles Patch Pebble Poppy Scout Snowy Sunny Tiger Toffee Waffles "
    "Whiskers Ziggy Muffin Acorn Bramble Clover Dusty Echo Fern Maple Olive Pickle Twig Willow"
).split()

ANIMALS = (
    "fox rabbit bear mouse cat dog duck frog hedgehog squirrel owl deer pig goat cow horse sheep "
    "hen wolf lion tiger monkey elephant turtle snail bee ant crab whale dolphin penguin badger "
    "beaver otter mole crow swan donkey kitten puppy parrot butterfly spider fish"
).split()
FANTASY = "robot dragon knight king queen wizard giant princess prince pirate snowman ghost".split()
THING_HEROES = (
    "cloud|boat|train|tree|star|teddy bear|kite|lamp|teapot|clock|leaf|balloon|little car|snowflake"
).split("|")
JOBS = "baker farmer sailor painter teacher gardener doctor cook fisherman builder".split()

# The pronoun of a named hero: she, he, it.
FEMALE = "she her her".split()
MALE = "he him his".split()
NEUTER = "it it its".split()

# A place with the preposition that puts someone there and the one that brings someone there.
PLACES = {
    "forest": "in",
    "garden": "in",
    "park": "in",
    "kitchen": "in",
    "village": "in",
    "meadow": "in",
    "barn": "in",
    "school": "at",
    "market": "at",
    "beach": "on",
    "farm": "on",
    "hill": "on",
    "river": "by",
    "lake": "by",
    "sea": "by",
    "pond": "by",
    "old bridge": "by",
    "town": "in",
    "library": "in",
    "valley": "in",
}
ROOMS = "kitchen garden bedroom bathroom hall attic cellar office library classroom".split()

THINGS = (
    "ball kite book hat cup box key bell coin map drum boat bag shell stone ring lamp clock spoon "
    "basket ribbon feather scarf car doll pencil blanket bottle button candle whistle mirror"
).split()
TREASURES = (
    "golden key|silver bell|red kite|blue shell|small map|shiny coin|old book|green stone|"
    "wooden box|tiny drum|glass ball|paper boat|warm scarf|yellow hat|magic feather|little lamp"
).split("|")
FOODS = (
    "apples pears plums cherries carrots cakes cookies nuts eggs grapes bananas oranges lemons "
    "berries pancakes potatoes tomatoes peaches muffins sweets"
).split()
COUNTABLES = [
    *FOODS,
    *"books pencils balls stones flowers stamps toys coins stickers shells buttons cups".split(),
]
DISHES = (
    "apple pie|vegetable soup|bread|a chocolate cake|pancakes|a fruit salad|honey bread|a berry pie"
).split("|")

TRAITS = (
    "little small kind brave clever shy happy curious gentle quiet cheerful friendly lazy funny "
    "young hungry tiny patient proud"
).split()
WEATHERS = "sunny rainy windy snowy cloudy foggy warm cold stormy".split()
COLOURS = "red blue green yellow orange purple pink brown black white grey".split()
SIZES = "big small tiny large".split()
SPORTS = "football tennis swimming running chess basketball dancing skating cycling".split()
HOBBIES = (
    "reading|painting|singing|drawing|swimming|cooking|playing football|playing chess|dancing|"
    "gardening|playing the piano|riding my bike|taking photos|fishing|walking in the forest"
).split("|")
PETS = "dog cat rabbit hamster parrot fish turtle pony mouse bird".split()
CITIES = (
    "Paris London Rome Berlin Madrid Lisbon Vienna Dublin Oslo Tokyo Delhi Cairo Boston Chicago "
    "Toronto Sydney Prague Warsaw Athens Helsinki Lima Nairobi"
).split()
FAMILY = "mother father sister brother friend grandmother grandfather cousin aunt uncle".split()

SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi ga go gu ha he ka ke ki ko la le li lo lu ma me mi mo "
    "mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so ta te ti to va ve vi wa za ze zi zo "
    "bra cle dri flo gre kri plu sha tho tri xan yor zel quin lor mar win ter gor nix bel dar"
).split()

# Characters of two, three and four bytes, so that the tokenizer sees them too.
GLYPHS = list("éèüößñçåøłšžабвгдеλπσω中文日本語東京你好안녕あいうえお☀★♥✓→€😀🙂🎉🚀🐱🌍🍎👍")


def article(noun: str) -> str:
    """The noun with its indefinite article: an owl, a fox."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def capital(text: str) -> str:
    """The text with its first letter made large and the rest untouched."""
    return text[:1].upper() + text[1:]


def listing(items: list[str], last: str = "and") -> str:
    """Items as English lists them: a, b and c."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"
