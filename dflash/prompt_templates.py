"""Prompts made from templates written for this project, so that anyone can make training data without a data set.

Each draw picks a template and fills its slots, so one seed gives thousands of distinct prompts a domain, always the
same ones in the same order; asking for more only appends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash.errors import UsageError

DOMAINS = ("math", "code", "chat")
_PATIENCE = 300  # draws without a new prompt before a domain counts as exhausted


@dataclass(frozen=True)
class TextPrompt:
    domain: str
    prompt: str


def template_prompts(rows: int, domains: Sequence[str] = DOMAINS, seed: int = 0) -> list[TextPrompt]:
    """``rows`` distinct prompts, the domains in turn. Raises ``UsageError`` for an unknown or exhausted domain."""
    if rows < 1:
        raise UsageError(f"rows is {rows}; it must be at least 1")
    if unknown := [domain for domain in domains if domain not in DOMAINS]:
        raise UsageError(f"domain {unknown[0]!r} is unknown; there are {', '.join(DOMAINS)}")
    streams = [(domain, _distinct(domain, seed)) for domain in dict.fromkeys(domains)]
    return [
        TextPrompt(domain, next(stream)) for _, (domain, stream) in zip(range(rows), _in_turn(streams), strict=False)
    ]


def _in_turn(streams: Sequence[tuple[str, Iterator[str]]]) -> Iterator[tuple[str, Iterator[str]]]:
    while True:
        yield from streams


def _distinct(domain: str, seed: int) -> Iterator[str]:
    rng, seen = random.Random(f"{seed}/{domain}"), set[str]()
    while True:
        for _ in range(_PATIENCE):
            prompt = _MAKERS[domain](rng)
            if prompt not in seen:
                break
        else:
            raise UsageError(f"the {domain} templates have no more than about {len(seen)} distinct prompts")
        seen.add(prompt)
        yield prompt


def _fill(template: str, slots: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Every ``{slot}`` drawn from its list; ``{slot2}`` is another value of the same list, ``{5-40}`` a number."""
    drawn: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        key = match[1]
        if bounds := re.fullmatch(r"(\d+)-(\d+)(?:x(\d+))?", key):
            low, high, step = int(bounds[1]), int(bounds[2]), int(bounds[3] or 1)
            return str(rng.randrange(low, high + 1, step))
        if key not in drawn:
            choices = slots[key.rstrip("23")]
            drawn[key] = rng.choice([choice for choice in choices if choice not in drawn.values()])
        return drawn[key]

    text = re.sub(r"\{([a-z0-9-]+)\}", value, template)
    return text[0].upper() + text[1:]


def _list(text: str) -> list[str]:
    return text.split(", ")


# Math: word problems of two to four steps ------------------------------------------------------------------------

_NAMES = _list(
    "Ana, Ben, Carla, Dev, Elif, Farid, Grace, Hugo, Ines, Jamal, Keiko, Liam, Mara, Nadia, Omar, Paula, Quinn, Rosa, "
    "Samir, Teresa, Uma, Victor, Wen, Yusuf, Zoe, Marco, Lucia, Peter, Helena, Noah, Amara, Tom, Sofia, Arjun, Beatriz"
)
_ITEMS = _list(
    "apples, notebooks, stickers, marbles, cookies, pencils, candles, postcards, tomatoes, roses, muffins, seashells, "
    "buttons, bracelets, lemons, balloons, comic books, bookmarks, sandwiches, stamps, tulips, peaches, oranges, beads"
)
_PLACES = _list("market, school fair, bakery, library, farm, garden shop, museum, harbour, campsite, toy store")
_JOBS = _list("gardener, baker, painter, tailor, plumber, tutor, driver, photographer, carpenter, florist")
_MATH_SLOTS = {"name": _NAMES, "item": _ITEMS, "place": _PLACES, "job": _JOBS}
_MATH = (
    "{name} has {12-90} {item}. {name2} gives {name} {3-30} more, and then {name} shares all of them equally among "
    "{2-6} friends. How many {item} does each friend get, and how many are left over?",
    "At the {place}, {name} buys {2-9} {item} for ${2-12} each and {2-9} {item2} for ${1-8} each. {name} pays with a "
    "${100-200x50} bill. How much change does {name} get?",
    "A {job} earns ${14-40} an hour and works {4-9} hours a day, {3-6} days a week. How much does the {job} earn in "
    "{2-8} weeks?",
    "{name} reads {12-45} pages a day. A book has {180-600x20} pages, and {name} has already read {20-100x10} of them. "
    "How many more days does {name} need to finish the book?",
    "A box holds {6-24} {item}. The {place} ordered {5-40} boxes, but {2-15} {item} were broken. How many good {item} "
    "arrived?",
    "{name} is {2-9} years older than {name2}. In {3-12} years the sum of their ages will be {50-90}. How old is "
    "{name2} now?",
    "A train travels at {40-120x10} km per hour for {2-6} hours and then at {30-100x10} km per hour for {1-4} hours. "
    "How many kilometres does it travel in all, and what is its average speed?",
    "{name} saves ${5-40x5} every week. A bicycle costs ${150-600x25}, and there is a discount of {10-40x5} percent. "
    "After how many weeks can {name} buy it?",
    "The {place} sold {20-90} {item} on Friday, twice as many on Saturday, and {5-19} fewer on Sunday than on "
    "Saturday. How many {item} were sold in the three days?",
    "A recipe for {2-6} people needs {100-600x50} grams of flour and {2-8} eggs. {name} cooks for {8-30x2} people. How "
    "much flour and how many eggs does {name} need?",
    "{name} plants {4-15} rows of {item} with {6-20} in each row. A storm destroys a quarter of them. How many {item} "
    "remain?",
    "{name} and {name2} collect {item}. {name} has {2-5} times as many as {name2}, and together they have {60-300x12}. "
    "How many does each of them have?",
    "A tank holds {200-900x50} litres. One pipe fills it with {10-40} litres a minute while another drains {2-9} "
    "litres a minute. How long does it take to fill the empty tank?",
    "The price of a ticket to the {place} is ${8-30} for adults and ${3-7} for children. A group of {2-9} adults and "
    "{3-25} children gets ${5-20} off the total. How much does the group pay?",
    "{name} runs {2-9} km on each weekday and {4-15} km on each day of the weekend. How many kilometres does {name} "
    "run in {2-10} weeks?",
    "A class has {18-36x2} students. Half of them play football, {2-6} of the others play chess, and the rest paint. "
    "How many students paint?",
    "{name} bought {3-12} packs of {item} with {4-20} in each pack and gave away {5-20} {item}. Then {name} found "
    "{2-30} more. How many {item} does {name} have?",
    "A garden is {6-40} metres long and {3-25} metres wide. {name} puts a fence around it that costs ${4-15} a metre. "
    "What does the fence cost, and how large is the garden?",
    "A phone plan costs ${10-40x5} a month and ${1-5} for each gigabyte above {2-10}. {name} used {12-30} gigabytes "
    "this month. What is the bill?",
    "{name} mixes {2-9} litres of juice that costs ${2-6} a litre with {2-9} litres that costs ${3-8} a litre. What "
    "does one litre of the mixture cost?",
    "In a game, {name} scores {10-60} points in the first round, loses {5-25} in the second, and doubles the score in "
    "the third. {name2} has {30-150} points. Who is ahead, and by how much?",
    "What is {12-99} times {11-49}, minus {100-900}? Show your steps.",
    "Find {5-95x5} percent of {40-900x20}, then add {7-88}. Explain each step.",
    "Solve for x: {2-9}x + {3-40} = {50-200}. Explain how you find the answer.",
    "The average of {3-5} numbers is {10-50}. When one more number is added, the average becomes {51-70}. What is the "
    "number that was added?",
    "The {place} opens at {7-10} in the morning and closes at {4-9} in the evening. {4-30} visitors come every hour. "
    "How many visitors come in a week of {5-7} days?",
    "{name} drives {120-480x20} km with {8-30} litres of fuel. Fuel costs ${1-3} a litre. What does a trip of "
    "{100-900x50} km cost?",
    "A shop sells {item} at {2-6} for ${3-15}. How much do {12-60x6} {item} cost?",
)

# Code: Python tasks by operation and by function to complete --------------------------------------------------------

_SUBJECTS = _list(
    "a list of integers, a list of strings, a sentence, a dictionary of counts, a nested list, a matrix, a list of "
    "tuples, a CSV line, a binary string, a list of dates, a set of words, a list of floats, a text file, a linked "
    "list, a binary tree, a queue of tasks, a URL, a JSON document, a list of prices, a log file"
)
_OPERATIONS = _list(
    "counts how often each element occurs, removes everything that occurs more than twice, returns the elements in "
    "reverse order, finds the largest and the smallest element, checks whether it is sorted, groups the elements by "
    "length, returns the three most common elements, splits it into chunks of equal size, rotates it by a given number "
    "of places, computes a running total, finds the second largest element, merges it with another one, "
    "validates it and raises a ValueError when it is wrong, turns it into a readable string, compares it with another "
    "one and returns the differences, samples elements from it at random, returns every other element, "
    "searches it for a given value and returns all positions, replaces missing values by a default, "
    "sorts it by two keys, converts it to a dictionary, measures its depth or length without built-in functions"
)
_WAYS = (
    "", "Use only the standard library.", "Add a docstring and two examples.", "Include type hints.",
    "Write unit tests for it.", "Explain its time complexity.", "Do it without loops.", "Use recursion.",
    "Handle empty input.", "Keep it under ten lines.", "Comment each step.", "Show how to call it.",
)  # fmt: skip
_VERBS = _list("count, sum, collect, filter, average, sort, group, pair, find, index")
_KINDS = {
    "words": ("list[str]", '["tree", "sun", "river"]'),
    "numbers": ("list[int]", "[4, 8, 15, 16]"),
    "scores": ("dict[str, int]", '{"ana": 7, "ben": 9}'),
    "points": ("list[tuple[int, int]]", "[(0, 1), (3, 5)]"),
    "text": ("str", '"the quick brown fox"'),
    "prices": ("list[float]", "[2.5, 3.0, 9.99]"),
    "rows": ("list[list[int]]", "[[1, 2], [3, 4]]"),
}
_CONDITIONS = _list(
    "that are larger than a limit, that occur only once, that start with a vowel, that are divisible by three, "
    "that come before the longest one, that are palindromes, with an even position, that repeat, "
    "whose digits sum to ten, that are not in a second argument, between two bounds, shorter than four characters"
)
_CLASSES = _list(
    "a bank account, a shopping cart, a stack, a priority queue, a timer, a temperature converter, a library of books, "
    "a deck of cards, a tic-tac-toe board, an inventory, a simple calculator, a to-do list, a parking lot, a vending "
    "machine, a contact book, a cache with a size limit, a matrix, a fraction, a traffic light, a chess clock"
)
_METHODS = _list(
    "adding and removing entries, undoing the last action, printing a summary, saving to a file, comparing two "
    "objects, iterating over its contents, resetting it, counting operations, searching by name, checking limits"
)
_CODE_SLOTS = {
    "subject": _SUBJECTS, "operation": _OPERATIONS, "way": _WAYS, "class": _CLASSES, "method": _METHODS,
}  # fmt: skip
_CODE = (
    "Write a Python function that takes {subject} and {operation}. {way}",
    "Write a Python function that takes {subject} and {operation}. {way}",
    "How would you write a program in Python that reads {subject} and {operation}? {way}",
    "Write a Python class for {class} with methods for {method} and {method2}. {way}",
    "Give me a short Python script that reads {subject} from the user and {operation}.",
    "Explain step by step how to write code that takes {subject} and {operation}, then show the code in Python.",
)
_COMPLETE = (
    "Complete this Python function:\n```python\ndef {name}({kind}: {type}, limit: int = {limit}) -> {returns}:\n"
    '    """{sentence}\n\n    Example input: {example}\n    """\n```'
)


def _code(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return _fill(rng.choice(_CODE), _CODE_SLOTS, rng).strip()
    verb, kind, condition = rng.choice(_VERBS), rng.choice(list(_KINDS)), rng.choice(_CONDITIONS)
    returns = {"count": "int", "sum": "int", "average": "float", "index": "dict", "group": "dict"}.get(verb, "list")
    return _COMPLETE.format(
        name=f"{verb}_{kind}",
        kind=kind,
        type=_KINDS[kind][0],
        limit=rng.randint(1, 20),
        returns=returns,
        sentence=f"{verb.capitalize()} the {'parts' if kind == 'text' else kind} {condition}.",
        example=_KINDS[kind][1],
    )


# Chat: a topic and what to do with it --------------------------------------------------------------------------------

_TOPICS = _list(
    "sleep, volcanoes, chess, coffee, the Roman Empire, photosynthesis, public speaking, budgeting, climate change, "
    "jazz, electric cars, the Moon, teamwork, bread baking, democracy, vaccines, road trips, meditation, dinosaurs, "
    "time management, the Internet, gardening, black holes, friendship, inflation, poetry, robots, swimming, "
    "recycling, the French Revolution, job interviews, penguins, artificial intelligence, yoga, earthquakes, learning"
    " a language, city planning, honesty, the human heart, solar power, board games, the Amazon rainforest, stress, "
    "film making, ancient Egypt, running a small shop, whales, statistics, street food, parenting, mountains, coral "
    "reefs, music lessons, the printing press, cycling to work, tea, remote work, gravity, museums, memory, football,"
    " bees, architecture, healthy eating, online privacy, camping, the Silk Road, clouds, volunteering, photography, "
    "the stock market, folk tales, glaciers, cooking for beginners, space travel, curiosity, rivers, animal shelters,"
    " nuclear energy, kindness, keyboards, dance, the Great Wall of China, batteries, weather forecasts, motivation"
)
_READERS = _list(
    "a child, a busy manager, a new student, an old friend, a sceptic, a tourist, my grandmother, a beginner, "
    "a job applicant, a science class, a small team, a blog reader"
)
_TONES = _list("friendly, formal, funny, calm, persuasive, simple, enthusiastic, thoughtful")
_COUNTS = _list("three, four, five, six, seven")
_CHAT_SLOTS = {"topic": _TOPICS, "reader": _READERS, "tone": _TONES, "count": _COUNTS}
_CHAT = (
    "Explain {topic} to {reader}.",
    "Why does {topic} matter? Answer in a {tone} tone.",
    "Give me {count} facts about {topic}.",
    "Write a short story about {topic} for {reader}.",
    "Write a {tone} email to {reader} about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "List {count} common mistakes people make with {topic} and how to avoid them.",
    "Compare {topic} and {topic2}. What do they have in common?",
    "Summarize what {reader} should know about {topic}.",
    "Write a poem of {count} lines about {topic}.",
    "How can I get started with {topic}? Give me {count} steps.",
    "Write a {tone} dialogue between two friends about {topic}.",
    "What questions should I ask an expert on {topic}?",
    "Plan a lesson about {topic} for {reader}, with {count} activities.",
    "Describe the history of {topic} in {count} sentences.",
    "Write a {tone} blog post about {topic} with a title and {count} sections.",
    "What would change if {topic} disappeared from our lives?",
    "Give {reader} {count} tips on {topic}.",
    "Act as a {tone} guide and tell {reader} about {topic}.",
    "Is {topic} more important than {topic2}? Argue both sides.",
    "Write a product description about {topic} in a {tone} tone.",
    "What is a common myth about {topic}, and what is true?",
)  # fmt: skip


def _math(rng: random.Random) -> str:
    return _fill(rng.choice(_MATH), _MATH_SLOTS, rng)


def _chat(rng: random.Random) -> str:
    return _fill(rng.choice(_CHAT), _CHAT_SLOTS, rng)


_MAKERS: dict[str, Callable[[random.Random], str]] = {"math": _math, "code": _code, "chat": _chat}
