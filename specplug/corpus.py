"""The `tiny` corpus: chat examples written by a small grammar from a seed, so that the embedded pair needs no download.

Four categories: `story` (branching continuations), `qa` (a question about a given passage), `rewrite` (a given text with
one change) and `arithmetic` (a worked word problem). Each example is one user turn and one answer; the last line of
the answer is what the task score compares. Whether an example is held out is decided by a hash of its prompt alone, so
no training set of any seed or size can contain a held-out prompt.

Knows nothing about tokens or models.
"""

import hashlib
import random
from collections.abc import Callable, Iterator

CATEGORIES = ("story", "qa", "rewrite", "arithmetic")
HELD_OUT_SHARE = 20  # one prompt in so many is held out

NAMES = [
    "Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Sam", "Lena", "Finn", "Nora", "Paul",
    "Rosa", "Hugo", "Alma", "Otto", "Vera", "Emil", "Jana", "Luis", "Cora", "Theo", "Marta", "Oscar", "Greta",
    "Simon", "Clara", "Felix", "Nina", "Jonas", "Vito", "Elsa",
]  # fmt: skip
ANIMALS = [
    "fox", "owl", "cat", "dog", "goat", "duck", "frog", "mouse", "horse", "rabbit", "hedgehog", "badger",
    "beaver", "turtle", "sparrow", "donkey",
]  # fmt: skip
PLACES = [
    "mill", "bridge", "market", "harbour", "forest", "garden", "library", "station", "castle", "lake", "bakery",
    "lighthouse", "orchard", "workshop", "meadow", "village",
]  # fmt: skip
OBJECTS = [
    "kite", "lamp", "book", "drum", "boat", "clock", "basket", "violin", "ladder", "mirror", "wagon", "blanket",
    "telescope", "umbrella", "compass", "trumpet",
]  # fmt: skip
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "purple", "orange", "silver", "brown"]
FOODS = [
    "bread", "soup", "cheese", "apples", "berries", "honey", "cake", "nuts", "plums", "carrots", "pancakes",
    "noodles",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
THINGS = ["apples", "coins", "shells", "pencils", "stones", "cards", "buttons", "stamps", "marbles", "tickets"]

# What usually lives where: the story keeps to it most of the time, so there is something to know by heart.
HOME = dict(zip(PLACES, ANIMALS, strict=True))

Slots = dict[str, str]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def pick(rng: random.Random, *branches: tuple[float, str]) -> str:
    """One of the branches, drawn by weight."""
    weights, texts = zip(*branches, strict=True)
    return rng.choices(texts, weights)[0]


def draw_slots(rng: random.Random) -> Slots:
    return {
        "name": rng.choice(NAMES),
        "animal": rng.choice(ANIMALS),
        "place": rng.choice(PLACES),
        "object": rng.choice(OBJECTS),
        "colour": rng.choice(COLOURS),
        "food": rng.choice(FOODS),
        "day": rng.choice(DAYS),
    }


def with_articles(s: Slots) -> Slots:
    return {**s, "a_colour": article(s["colour"]), "a_animal": article(s["animal"])}


def fill(sentences: list[str], s: Slots) -> str:
    return " ".join(sentences).format(**with_articles(s))


def story(rng: random.Random) -> tuple[str, str]:
    s = draw_slots(rng)
    s["animal"] = HOME[s["place"]] if rng.random() < 0.85 else s["animal"]
    weather = pick(rng, (0.7, "sunny"), (0.2, "windy"), (0.1, "rainy"))
    ending = {
        "sunny": "The sun went down behind the {place}, and they shared some {food}. Nobody wanted more {food} after that.",
        "windy": "The wind grew strong around the {place}, so they hid inside and ate {food}. They had never eaten better {food}.",
        "rainy": "Soon the rain fell on the {place}, so they ran home and ate warm {food}. They love {food} on such a day.",
    }[weather]
    finding = pick(
        rng,
        (0.75, "Near the {place}, {name} found {a_colour} {object} in the grass."),
        (0.25, "Behind a wall, {name} saw {a_colour} {object} and picked it up."),
    )
    meeting = pick(
        rng,
        (0.7, "It belonged to a little {animal} who had lost it."),
        (0.2, "A little {animal} came and asked for it."),
        (0.1, "Nobody knew whose it was, but a little {animal} wanted it."),
    )
    feeling = pick(
        rng,
        (0.65, '"Thank you for the {object}," said the {animal}.'),
        (0.35, '"Let us play with the {object}," said the {animal}.'),
    )
    playing = pick(
        rng,
        (0.7, "{name} and the {animal} played with the {colour} {object} all day."),
        (0.3, "{name} gave the {object} back, and they became friends."),
    )
    body = f"On a {weather} day, {{name}} walked to the {{place}}. {finding} {meeting} {feeling} {playing} {ending}"
    prompt = "Write a short story about {name}, {a_colour} {object} and the {place}. There should be {food} in it."
    last = "This was the story of {name}, the {colour} {object} and the {place}."
    return fill([prompt], s), fill([f"{body}\n{last}"], s)


# Each sentence of a passage comes in two wordings.
PASSAGE = (
    ("{name} lives near the {place}.", "{name} has a small house by the {place}."),
    (
        "In the morning, {name} plays with {a_colour} {object}.",
        "After breakfast, {name} takes out {a_colour} {object}.",
    ),
    ("On {day}, {name} meets {a_animal}.", "Every {day}, {name} goes for a walk with {a_animal}."),
    (
        "They like to eat {food} together, and they always want more {food}.",
        "They always bring some {food} with them, because they love {food}.",
    ),
    ("At night, {name} dreams of a trip to the {far_place}.", "Next year, {name} wants to see the {far_place}."),
)
QUESTIONS = {
    "place": (0, "Where does {name} live?", "{name} lives near the {place}"),
    "object": (1, "Which thing does {name} have?", "{name} has {a_colour} {object}"),
    "day": (2, "When does {name} see {a_animal}?", "{name} sees {a_animal} on {day}"),
    "animal": (2, "Who does {name} see on {day}?", "{name} sees {a_animal} on {day}"),
    "food": (3, "What do they eat?", "they eat {food}"),
    "far_place": (4, "Where would {name} like to go?", "{name} would like to go to the {far_place}"),
}


def draw_passage(rng: random.Random) -> tuple[Slots, list[str]]:
    """Slots, and one wording of each sentence with the slots still open."""
    s = draw_slots(rng)
    s["far_place"] = rng.choice([place for place in PLACES if place != s["place"]])
    return s, [rng.choice(wordings) for wordings in PASSAGE]


def qa(rng: random.Random) -> tuple[str, str]:
    s, sentences = draw_passage(rng)
    asked = rng.choice(list(QUESTIONS))
    index, question, answer = QUESTIONS[asked]
    prompt = f"Read the text and answer.\nText: {fill(sentences, s)}\nQuestion: {fill([question], s)}"
    reply = f'The question is: {question} In the text we read: "{sentences[index]}" This tells us that {answer}.'
    return prompt, f"{fill([reply], s)}\nAnswer: {s[asked]}"


CHANGEABLE = {
    "name": NAMES,
    "object": OBJECTS,
    "colour": COLOURS,
    "food": FOODS,
    "day": DAYS,
}


def rewrite(rng: random.Random) -> tuple[str, str]:
    s, sentences = draw_passage(rng)
    kind = rng.choice(list(CHANGEABLE))
    new = rng.choice([word for word in CHANGEABLE[kind] if word not in s.values()])
    prompt = f"Write the text again with {new} instead of {s[kind]}.\nText: {fill(sentences, s)}"
    return prompt, fill(sentences, {**s, kind: new})


def arithmetic(rng: random.Random) -> tuple[str, str]:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    finds, gives = rng.choice(("finds", "buys", "wins")), rng.choice(("gives", "lends", "sells"))
    start, more = rng.randint(2, 12), rng.randint(1, 8)
    total = start + more
    away = rng.randint(1, min(8, total - 1))
    prompt = (
        f"{name} has {start} {thing}. {name} {finds} {more} more {thing}. Then {name} {gives} {away} {thing} to {other}. "
        f"How many {thing} does {name} have now?"
    )
    reply = (
        f"At first, {name} has {start} {thing}. Then {name} {finds} {more} more, and {start} + {more} = {total}. "
        f"After that, {name} {gives} {away} to {other}, and {total} - {away} = {total - away}. "
        f"So now {name} has {total - away} {thing}.\nAnswer: {total - away}"
    )
    return prompt, reply


WRITERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "story": story,
    "qa": qa,
    "rewrite": rewrite,
    "arithmetic": arithmetic,
}


def is_held_out(prompt: str) -> bool:
    """Decided by the prompt alone, so the two halves are disjoint whatever the seeds."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % HELD_OUT_SHARE == 0


def generate(seed: int, count: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Yield `count` examples `{id, category, prompt, reference}`, the categories in turn.

    `held_out=False` yields training examples, `held_out=True` only prompts that no training set contains.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    for index in range(count):
        category = CATEGORIES[index % len(CATEGORIES)]
        while True:
            prompt, reply = WRITERS[category](rng)
            if is_held_out(prompt) == held_out and not (held_out and prompt in seen):
                break
        seen.add(prompt)
        yield {
            "id": f"{category}-{index // len(CATEGORIES)}",
            "category": category,
            "prompt": prompt,
            "reference": reply,
        }
