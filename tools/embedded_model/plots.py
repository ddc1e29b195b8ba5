"""The plots of the short stories: rows of sentences to choose from, with slots to fill.

Slots: N the hero's name, S s o p P the hero's pronouns (She she her her Her), kind and trait what
the hero is; F the friend's name, FS fs fo fp FP the friend's pronouns, fkind what the friend is,
a_f the same with its article; home where the hero lives, at and place another place, far a third;
thing and a_thing an object, food and dish something to eat, day a part of the day, weather.
"""

# Sentences are kept whole where that reads better.
# ruff: noqa: E501

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """One way a story can go. Every row gives one sentence or a few; one option each is told.

    ``themes`` are what a user may ask for, ``asks`` are questions with answers about the story.
    """

    themes: str
    rows: tuple[str, ...]
    asks: tuple[tuple[str, str], ...]


OPENINGS = (
    "Once upon a time, there was {a_hero} named {N}. {S} lived {home}.",
    "Once upon a time, there was {a_hero} called {N}. {S} lived {home}.",
    "Once upon a time, {a_hero} called {N} lived {home}.",
    "There was once {a_hero} named {N}. {S} lived {home}.",
    "Once there was {a_hero} called {N}. {S} lived {home}.",
    "A long time ago, {a_hero} named {N} lived {home}.",
    "{N} was {a_hero}. {S} lived {home}.",
    "In a land far away, there lived {a_hero} called {N}. {S} lived {home}.",
)
HABITS = (
    "Every {day}, {s} looked at the sky and smiled.",
    "{S} liked to sing and to play.",
    "{S} loved to walk and to look at everything.",
    "{P} days were quiet, and {s} liked them so.",
    "Everyone there knew {o}.",
    "{S} had a small home with a round door.",
    "{S} was always ready to help.",
    "{S} liked the smell of flowers and the sound of the rain.",
)
ENDINGS = (
    "From that day on, {N} and {F} were the best of friends.",
    "And they lived happily ever after.",
    "That night, {N} slept well and dreamed of the next day.",
    "{N} never forgot that day.",
    "Then {N} went home with a smile.",
    "And when the sun went down, they were still laughing.",
    "It was the best day of all.",
    "{N} and {F} still tell that story to everyone they meet.",
)

PLOTS = (
    Plot(
        "something lost|a lost {thing}|losing something|{a_thing}",
        (
            "{N} had {a_thing}, and {s} loved it very much.|The thing {N} loved most was {a_thing}.",
            "One {weather} {day}, the {thing} was gone.|But one {day}, {s} could not find the "
            "{thing}.|One {day}, {s} looked for the {thing}, and it was not there.",
            "{N} looked under the bed and behind the door, but it was not there.|{S} looked here "
            "and {s} looked there, but {s} could not find it.|{S} searched the whole {day} and "
            "became very sad.",
            'Then {a_f} called {F} came by. "Why are you so sad?" asked {F}. "I have lost my '
            '{thing}," said {N}.|{P} friend {F}, {a_f}, saw {o} and asked, "What is wrong?" "My '
            '{thing} is gone," said {N}.',
            '"I will help you," said {F}, and they looked together.|"Let us look together," said '
            '{F}.|"Do not cry," said {F}. "Two can see more than one."',
            "At last they found it {at}.|They looked for a long time. Then {F} saw it {at}.|"
            "They walked and walked, and there it was, {at}.",
            '"Thank you, {F}!" said {N}, and {s} danced with joy.|{N} was so happy that {s} gave '
            "{F} a big hug.",
        ),
        (
            ("What did {N} lose?", "{N} lost {a_thing}."),
            ("Where was the {thing}?", "The {thing} was {at}."),
            ("Who helped {N}?", "{F} helped {N}."),
        ),
    ),
    Plot(
        "a treasure|finding something|honesty|{a_thing}",
        (
            "One {weather} {day}, {N} went for a walk and saw something {at}.|One {day}, {N} saw "
            "something shiny {at}.",
            "It was {a_thing}!|{S} came closer. It was {a_thing}!",
            '"How pretty it is," said {N}. "But it is not mine."|{N} wanted to keep it. But {s} '
            "knew that someone must miss it.",
            "So {s} asked everyone {s} met. At last {s} came to {a_f} called {F}.|{S} went from "
            "door to door, and behind the last door lived {a_f} named {F}.",
            '"Is this yours?" asked {N}. "Yes!" said {F}. "I looked for it everywhere!"|{F} saw '
            'the {thing} and began to smile. "You found it!" {fs} said.',
            "{F} was so glad that {fs} gave {N} some {food}.|To say thank you, {F} made {dish} for "
            "{N}.",
            "{N} learned that it feels good to be honest.|It was better to have a friend than "
            "to have {a_thing}.",
        ),
        (
            ("What did {N} find?", "{N} found {a_thing}."),
            ("Where did {N} find the {thing}?", "{N} found the {thing} {at}."),
            ("Who owned the {thing}?", "The {thing} belonged to {F}."),
        ),
    ),
    Plot(
        "a storm|the rain|the wind|bad weather",
        (
            "One {day}, dark clouds came over the hills.|One {day}, the sky became dark and the "
            "wind began to blow.",
            "{N} was far from home, {at}.|{N} was {at} when the first drops fell.",
            "The rain fell and the wind was loud, and {N} was afraid.|There was thunder, and {N} "
            "began to run.",
            'Then {s} heard a voice. "Come in, come in!" It was {a_f} called {F}.|A small door '
            'opened. "Quick, come inside!" said {F}, {a_f}.',
            "{F} gave {o} a warm blanket and some {food}.|They sat by the fire and ate {food}.|"
            "It was warm inside, and they drank hot tea.",
            "They told each other stories until the storm was over.|They played and sang, and soon "
            "they forgot the storm.",
            "When the sun came out, there was a big rainbow in the sky.|At last the rain stopped, "
            "and the world was clean and bright.",
        ),
        (
            ("Why was {N} afraid?", "{N} was afraid because of the storm."),
            ("Who helped {N}?", "{F} helped {N}."),
            ("Where was {N} when the rain began?", "{N} was {at}."),
        ),
    ),
    Plot(
        "sharing|kindness|a hungry friend|{food}|being kind",
        (
            "One {day}, {N} had a basket full of {food}.|One {weather} {day}, {N} carried a big "
            "bag of {food} home.",
            "On the way, {s} met {a_f} called {F}. {F} looked thin and sad.|{At} sat {a_f} named "
            "{F}, who was very hungry.",
            '"I have not eaten today," said {F}.|"What is wrong?" asked {N}. "I am so hungry," '
            "said {F}.",
            '{N} thought for a moment. Then {s} said, "Take half of my {food}."|"Then let us eat '
            'together," said {N}, and {s} opened the bag.',
            "They sat down {at} and ate until nothing was left.|They ate and talked, and the sun "
            "was warm.",
            "Some days later, {N} had nothing to eat. Then someone knocked at the door. It was {F} "
            'with {dish}!|The next week, {F} came to {N} with {dish}. "You helped me," said {F}. '
            '"Now I help you."',
            "{N} learned that what you share comes back to you.|So both of them were full and "
            "happy.",
        ),
        (
            ("What did {N} share?", "{N} shared {food} with {F}."),
            ("Who was hungry?", "{F} was hungry."),
            ("What did {F} bring?", "{F} brought {dish}."),
        ),
    ),
    Plot(
        "a race|running|being slow|winning",
        (
            'One {day}, {a_f} called {F} said, "I am the fastest of all!"|{F}, {a_f}, was very '
            "fast and very proud.",
            '"Let us race," said {N}. Everyone laughed.|"I will race with you," said {N} quietly.',
            "They met {at} the next {day}. One, two, three, and they ran!|The race began {at}, and "
            "all their friends came to see it.",
            '{F} was soon far ahead. "I have so much time," {fs} thought, and {fs} lay down under '
            "a tree.|{F} ran so fast that {fs} took the wrong way and came to the {far}.",
            "{N} did not stop. Step by step, {s} went on.|{N} was not fast, but {s} never stopped.",
            "When {F} came to the end, {N} was already there.|And so {N} was the first to reach "
            "the end.",
            '"You are slow, but you never give up," said {F}. "Well done!"|{F} shook {p} hand and '
            'said, "Next time I will not be so proud."',
        ),
        (
            ("Who won the race?", "{N} won the race."),
            ("Where did the race begin?", "The race began {at}."),
            ("Who was very fast?", "{F} was very fast."),
        ),
    ),
    Plot(
        "a seed|a flower|a garden|waiting|patience",
        (
            "One {day}, {a_f} called {F} gave {N} a small seed.|One {weather} {day}, {N} found a "
            'tiny seed. "What is it?" {s} asked {F}, {a_f}.',
            '"Put it in the earth and give it water," said {F}.|"You must wait," said {F}. "Good '
            'things need time."',
            "So {N} put the seed into the earth {at}.|{N} dug a little hole {at} and put the seed "
            "inside.",
            "Every {day} {s} gave it water. One day passed, then two, then three, but nothing "
            "happened.|{S} waited and waited. Nothing came up.",
            '"It will never grow," said {N}. "Wait a little longer," said {F}.|{N} became sad, but '
            "{s} still gave it water.",
            "Then, one {weather} morning, there was a green leaf!|And one day a small green leaf "
            "looked out of the earth.",
            "The plant grew and grew, and in summer it had a big {colour} flower.|Soon there was "
            "a tall plant with a {colour} flower, and everybody came to see it.",
        ),
        (
            ("What did {N} plant?", "{N} planted a seed."),
            ("Where did {N} plant the seed?", "{N} planted the seed {at}."),
            ("What colour was the flower?", "The flower was {colour}."),
        ),
    ),
    Plot(
        "learning|learning to {skill}|trying again|school",
        (
            "{N} wanted to learn to {skill}, but {s} did not know how.|There was one thing that "
            "{N} could not do: {s} could not {skill}.",
            "One {day}, {s} tried it alone {at}. It did not go well.|{S} tried once, {s} tried "
            "twice, but it was too hard.",
            '"I will never learn it," said {N}.|{N} sat down and cried a little.',
            'Then {a_f} called {F} sat down beside {o}. "I can teach you," said {F}.|{F}, {a_f}, '
            'saw {o}. "Nobody can do it the first time," said {F}. "Try again!"',
            "So they met {at} every {day}, and {N} tried again and again.|They began slowly, and "
            "each {day} it was a little better.",
            "After a week, {N} could {skill} as well as {F}.|And then, one {weather} {day}, {N} "
            "could {skill} all alone!",
            '"Look at me!" {s} called, and {F} laughed with joy.|{N} learned that you can do hard '
            "things if you try again.",
        ),
        (
            ("What did {N} want to learn?", "{N} wanted to learn to {skill}."),
            ("Who taught {N}?", "{F} taught {N}."),
            ("Where did they meet?", "They met {at}."),
        ),
    ),
    Plot(
        "the dark|the night|being brave|fear|a noise|courage",
        (
            "{N} was afraid of the dark.|When the sun went down, {N} was always afraid.",
            "One night, {s} heard a strange noise. Knock, knock, knock!|One night, something made "
            "a noise outside. Tap, tap, tap!",
            '{N} hid under the blanket. But the noise did not stop.|{P} heart beat fast. "Who is '
            'there?" {s} asked, but nobody answered.',
            "Then {s} took a little lamp and opened the door.|At last {s} took a deep breath and "
            "went to look.",
            "There, in the light, stood {a_f} called {F}. {FS} was cold and had lost {fp} way.|It "
            "was only {F}, {a_f}, who wanted to come in because it was cold.",
            '"I was afraid of you," said {N}. "And I was afraid of the dark," said {F}. They both '
            "laughed.|{N} let {fo} in, and they ate {food} by the light of the lamp.",
            "After that, {N} was not afraid of the dark any more.|Now {N} knew that the dark is "
            "only a place without light.",
        ),
        (
            ("What was {N} afraid of?", "{N} was afraid of the dark."),
            ("Who made the noise?", "{F} made the noise."),
            ("What did {N} hear?", "{N} heard a strange noise."),
        ),
    ),
    Plot(
        "a birthday|a party|a cake|baking",
        (
            "It was the birthday of {p} friend {F}, {a_f}.|Tomorrow was a big day: {F}, {a_f} and "
            "{p} best friend, had {fp} birthday.",
            '"I will bake a cake," said {N}.|{N} wanted to make the best cake in the world.',
            "{S} took eggs, milk and flour, and a lot of {food}.|{S} went to the market and came "
            "home with flour, eggs and {food}.",
            "But oh no! The cake fell on the floor.|But {s} forgot the cake, and it became black.",
            "{N} was sad. Then {s} had an idea: {s} put the {food} on a plate and lit a candle.|"
            "There was no time for another cake. So {N} made a big plate of {food} with a candle "
            "on top.",
            'When {F} came, {fs} laughed and said, "{Food}! I like them more than cake!"|{F} '
            'looked at it and smiled. "That is the best birthday cake of all," {fs} said.',
            "They sang and danced until the stars came out.|All their friends came {at}, and they "
            "had a wonderful party.",
        ),
        (
            ("Whose birthday was it?", "It was {F}'s birthday."),
            ("What did {N} want to bake?", "{N} wanted to bake a cake."),
            ("What did {N} put on the plate?", "{N} put {food} on the plate."),
        ),
    ),
    Plot(
        "building|a house|a bridge|working together|a team",
        (
            "One {day}, {N} began to build a little house {at}.|{N} wanted a house of {p} own, so "
            "one {day} {s} began to build it {at}.",
            "{S} took some grass and some leaves, and soon it was ready.|{S} built it quickly, out "
            "of thin sticks.",
            "But in the night the wind came, and in the morning the house was gone.|Then a strong "
            "wind blew, and the house fell down.",
            '{A_f} called {F} came by. "Do not be sad," said {F}. "Let us build it again."|'
            '{N} wanted to give up. "I am strong, and you are clever," said {F}, {a_f}. "Together '
            'we can do it."',
            "{F} carried stones, and {N} put them one on top of the other.|They worked for three "
            "days, with wood and with stones.",
            "When the wind came back, it blew and blew, but the house did not move.|The new house "
            "was strong, and no wind could hurt it.",
            '"Come and live with me," said {N}, and {F} did.|They sat at the window, ate {food} '
            "and listened to the wind.",
        ),
        (
            ("What did {N} build?", "{N} built a house."),
            ("Where did {N} build the house?", "{N} built the house {at}."),
            ("Who helped {N}?", "{F} helped {N}."),
        ),
    ),
    Plot(
        "a quarrel|saying sorry|two friends|friends|friendship",
        (
            "{N} and {F}, {a_f}, were good friends.|{P} best friend was {F}, {a_f}. They did "
            "everything together.",
            "One {day}, they found {a_thing} {at}.|One {weather} {day}, there was {a_thing} {at}.",
            '"It is mine!" said {N}. "No, it is mine!" said {F}.|Both of them wanted it. They '
            "pulled and pulled.",
            "They became angry, and each went home alone.|Then they said bad words, and {F} ran "
            "away.",
            "At home it was very quiet. {N} missed {fp} laugh.|That {day}, {N} had nobody to play "
            "with, and {s} felt sad.",
            'So {s} took the {thing} and went to {F}. "I am sorry," said {N}. "You can have '
            'it."|{S} went to the door of {F} and said, "I am sorry. A friend is more than '
            '{a_thing}."',
            '"I am sorry too," said {F}. "Let us share it."|{F} smiled. "It can belong to both of '
            'us," {fs} said.',
        ),
        (
            ("What did they find?", "They found {a_thing}."),
            ("Who said sorry first?", "{N} said sorry first."),
            ("Where did they find the {thing}?", "They found it {at}."),
        ),
    ),
    Plot(
        "a map|an adventure|a journey|a long trip|a treasure map",
        (
            "One {day}, {N} found an old map in a box.|One {weather} {day}, the wind blew an old "
            "map to {p} door.",
            'There was a red cross on it. "A treasure!" said {N}.|"It shows the way to a '
            'treasure," said {p} friend {F}, {a_f}.',
            "{N} and {F} packed some {food} and went out.|So {s} took some {food} and asked {F}, "
            "{a_f}, to come along.",
            "They walked over the hills and through the woods, and they came to the {far}.|They "
            "crossed the river, climbed a hill and walked through the {far}.",
            "At last they stood {at}, where the red cross was.|The cross was {at}. They began to "
            "dig.",
            "They dug a deep hole and found {a_thing}.|Under a big stone they found {a_thing}.",
            '"It is pretty," said {N}. "But the best part was the way."|"The true treasure is that '
            'we went together," said {F}.',
        ),
        (
            ("What did they find?", "They found {a_thing}."),
            ("What did {N} find in the beginning?", "{N} found an old map."),
            ("Who went with {N}?", "{F} went with {N}."),
        ),
    ),
    Plot(
        "a new friend|a new neighbour|being shy|being alone|loneliness",
        (
            "{N} was often alone and wished for a friend.|{N} had no one to play with.",
            "One {day}, {a_f} called {F} moved into the house next door.|One {weather} {day}, "
            "{s} saw someone new {at}. It was {a_f} called {F}.",
            "{N} wanted to say hello, but {s} was too shy.|{N} looked through the window and did "
            "not know what to say.",
            "So {s} put some {food} at the door and ran away.|So {s} wrote a little letter and left "
            "it with {a_thing} at the door.",
            'The next {day}, there was a knock. {F} stood there. "Are you the kind one who left '
            'this for me?" {fs} asked.|In the evening, {F} came over. "Thank you," {fs} said. "I '
            'was alone too."',
            'Then {N} was not shy any more. "Come in!" {s} said.|They sat down {at} and talked '
            "until it was dark.",
            "They found out that they both liked {food} and songs.|After that, they met every "
            "{day}.",
        ),
        (
            ("Who moved in?", "{F} moved in."),
            ("Why did {N} not say hello?", "{N} was too shy."),
            ("Who was {F}?", "{F} was {a_f}."),
        ),
    ),
    Plot(
        "a wish|a star|the moon|magic|the stars",
        (
            "One night, {N} saw a star fall from the sky.|One clear night, {N} sat {at} and looked "
            "at the stars.",
            '"I wish I had a friend," {s} said.|Then {s} saw a falling star and made a wish: "I '
            'wish for {a_thing}."',
            "The next {day}, {N} looked around, but nothing had changed.|In the morning {s} opened "
            "the door, and there was nothing.",
            "Then {s} heard someone cry {at}. It was {a_f} called {F}.|On the way, {s} met {a_f} "
            "called {F}, who had hurt {fp} foot.",
            "{N} helped {fo} and carried {fo} home.|{N} sat down and sang a song until {F} could "
            "smile again.",
            '"How can I thank you?" asked {F}. "Be my friend," said {N}.|"You are so kind," said '
            '{F}. "I want to give you {a_thing}."',
            "That night, {N} looked at the stars and said thank you.|And far away, a small star "
            "was shining brightly.",
        ),
        (
            ("What did {N} see in the sky?", "{N} saw a star."),
            ("Who did {N} meet?", "{N} met {F}, {a_f}."),
            ("Who did {N} help?", "{N} helped {F}."),
        ),
    ),
    Plot(
        "helping|being small|a small hero|someone strong",
        (
            '"You are too small," everyone said to {N}. "You cannot help."|{N} was smaller than '
            "all the others, and that made {o} sad.",
            "One {day}, {F}, {a_f}, fell into a deep hole {at}.|One {weather} {day}, {s} heard a cry "
            "{at}. {A_f} called {F} was stuck between two stones.",
            "The big ones tried to help, but they could not reach {fo}.|Many came and pulled, but "
            "nobody could get {fo} out.",
            '"Let me try," said {N}, and everyone laughed.|Then {N} came. "I am small enough," {s} '
            "said.",
            "{N} went down with a rope and tied it around {F}.|{S} went in, took {fp} hand and "
            "showed {fo} the way out.",
            "They all pulled, and {F} was free!|Soon {F} was safe, and everyone cheered.",
            '"You are small, but your heart is big," said {F}.|After that, nobody said that {N} '
            "was too small.",
        ),
        (
            ("Who was in trouble?", "{F} was in trouble."),
            ("Where did it happen?", "It happened {at}."),
            ("Who helped {F}?", "{N} helped {F}."),
        ),
    ),
    Plot(
        "getting lost|the way home|going home|mother|a family",
        (
            "One {day}, {N} saw a {colour} butterfly and ran after it.|One {weather} {day}, {N} "
            "walked far, far away from home.",
            "{S} ran and ran, and when {s} stopped, {s} did not know where {s} was.|Soon nothing "
            "looked the same. {N} was lost.",
            '{At}, {s} met {a_f} called {F}. "Can you tell me the way home?" asked {N}.|{S} sat '
            "down {at}. There {a_f} called {F} found {o}.",
            '"What can you see from your home?" asked {F}. "I can see the {far}," said {N}.|"Where '
            'do you live?" asked {F}. "Near the {far}," said {N}.',
            '"Then I know the way," said {F}. They walked side by side.|{F} took {p} hand, and they '
            "walked until the moon was up.",
            "At last {N} saw a light. {P} mother stood at the door.|And there was {p} home, with "
            "a light in the window.",
            '"Thank you for bringing my child home," said the mother, and she gave {F} some '
            "{food}.|They all sat at the table and ate {dish}.",
        ),
        (
            ("Who showed {N} the way?", "{F} showed {N} the way."),
            ("What is near the home of {N}?", "The {far} is near the home of {N}."),
            ("Where did {N} meet {F}?", "{N} met {F} {at}."),
        ),
    ),
    Plot(
        "music|a song|a drum|singing|dancing",
        (
            "{N} loved music more than anything.|All day long, {N} made music on an old {tool}.",
            '"Too loud!" said the neighbours.|But nobody wanted to listen.',
            "So {s} went away and played alone {at}.|One {day}, {s} took the {tool} and went {to}.",
            "There {s} heard another song. It was {a_f} called {F}, who sang.|{A_f} called {F} came "
            "out from behind a tree and began to sing.",
            '"Let us play together," said {F}.|{N} played, and {F} sang. It sounded wonderful.',
            "One by one, the others came to listen.|The music went over the hills, and soon "
            "everyone came and danced.",
            '"Play it again!" they called.|After that, there was music every {day}.',
        ),
        (
            ("What did {N} love?", "{N} loved music."),
            ("Who sang?", "{F} sang."),
            ("Where did {N} play alone?", "{N} played {at}."),
        ),
    ),
    Plot(
        "the snow|winter|the cold|a snowman",
        (
            "One morning, everything was white. It was the first snow!|It was winter, and snow fell "
            "all night.",
            "{N} had never seen snow before. It was cold and soft.|{N} put on a warm scarf and went "
            "outside.",
            "{P} friend {F}, {a_f}, came too. They threw snow and laughed.|{At}, {s} met {F}, "
            '{a_f}. "Let us make a snowman!" said {F}.',
            "They made a big snowman and gave him {a_thing}.|The snowman had two stones for eyes "
            "and {a_thing} in his arm.",
            "Then {F} was cold. {N} gave {fo} the scarf.|Soon they were cold, so they ran inside and "
            "drank hot milk.",
            "When the sun came back, the snowman became smaller and smaller.|Some days later, the "
            "snowman was gone. Only {a_thing} was left.",
            '"Do not be sad," said {N}. "He will come back next winter."|"See you next winter," '
            "said {F}.",
        ),
        (
            ("What did they make?", "They made a snowman."),
            ("What did the snowman have?", "The snowman had {a_thing}."),
            ("Who was with {N}?", "{F} was with {N}."),
        ),
    ),
    Plot(
        "the sea|a boat|an island|a ship|sailing",
        (
            "{N} had a small boat with a {colour} sail.|One {day}, {N} found a boat with a "
            "{colour} sail.",
            '"I want to see what is behind the sea," {s} said to {F}, {a_f}.|{F}, {a_f}, wanted to '
            "come along.",
            "They took water and {food}, and the wind carried them away.|So they sailed for three "
            "days and ate {food}.",
            'On the third day, they saw a small island.|Then {F} called, "Land! I can see land!"',
            "There, under a tree, lay {a_thing}.|On the island lived a very old turtle. It gave "
            "them {a_thing}.",
            '"Every journey gives you something," said the old turtle.|They played on the sand '
            "until the sun was low.",
            "Then the wind turned, and they sailed home.|When they came home, everyone wanted to "
            "hear about it.",
        ),
        (
            ("What colour was the sail?", "The sail was {colour}."),
            ("What did they find on the island?", "They found {a_thing} on the island."),
            ("Who went with {N}?", "{F} went with {N}."),
        ),
    ),
    Plot(
        "a picture|painting|colours|drawing",
        (
            "{N} liked to paint. But {s} had only one colour: {colour}.|{N} had a box with only "
            "one colour in it, and it was {colour}.",
            "{S} painted a {colour} sun, a {colour} house and a {colour} tree.|So everything that "
            "{s} painted was {colour}.",
            '"That looks strange," the others said, and {N} was sad.|Some of the others laughed at '
            "it.",
            'But {F}, {a_f}, looked at it for a long time. "I like it," {fs} said.|Then {a_f} '
            'called {F} came {at}. "What a wonderful picture!" said {F}.',
            '"I have yellow and white," said {F}. "Let us paint together."|{F} brought two more '
            "colours, and they painted all {day}.",
            "They painted a big picture of the {far}.|Soon there was a picture of the {far}, so "
            "bright that everyone stopped to look.",
            "Now it hangs on the wall for all to see.|And {N} painted every {day} after that.",
        ),
        (
            ("What did {N} like to do?", "{N} liked to paint."),
            ("What colour did {N} have?", "{N} had {colour}."),
            ("What was in the big picture?", "The picture showed the {far}."),
        ),
    ),
)
