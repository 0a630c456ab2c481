"""A small Punkt model, trained on a made-up text, in the files of nltk's `punkt_tab`."""

import random

from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer

_WORDS = ["rain", "house", "river", "left", "street", "garden", "slowly", "today", "again", "letter", "heard", "table"]


def made_up_text(seed, num_sentences):
    """Returns sentences with abbreviations, initials and numbers, which end in words that also stand inside them."""
    draw = random.Random(seed)

    def sentence():
        words = draw.choices(_WORDS, k=draw.randint(3, 12))
        for place in range(len(words)):
            kind = draw.random()
            if kind < 0.1:
                words[place] = f"{draw.choice(['Dr.', 'Mr.'])} {draw.choice(['Smith', 'Jones', 'Brown'])}"
            elif kind < 0.15:
                words[place] = f"vol. {draw.randint(1, 30)}"
            elif kind < 0.17:
                words[place] = f"{draw.choice('ABC')}. Miller"
        start = draw.choice(["However", "They", "She"]) + " "
        return start + " ".join(words) + draw.choice(["."] * 8 + ["!", "?", '."', "..."])

    return "".join(sentence() + draw.choice([" ", " ", "  ", "\n", "\n\n"]) for _ in range(num_sentences))


def train():
    """Returns parameters with abbreviations, and with words that start sentences."""
    trainer = PunktTrainer()
    trainer.INCLUDE_ALL_COLLOCS = True
    trainer.train(made_up_text(0, 2000))
    return trainer.get_params()


def write(parameters, folder):
    """Writes the four files of a model."""
    folder.mkdir(parents=True)
    collocations = ["\t".join(pair) for pair in sorted(parameters.collocations)]
    contexts = [f"{word}\t{flags}" for word, flags in sorted(parameters.ortho_context.items())]
    files = {
        "collocations.tab": collocations,
        "sent_starters.txt": sorted(parameters.sent_starters),
        "abbrev_types.txt": sorted(parameters.abbrev_types),
        "ortho_context.tab": contexts,
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


def tokenizer(parameters):
    """Returns nltk's own splitter with the parameters."""
    return PunktSentenceTokenizer(parameters)
