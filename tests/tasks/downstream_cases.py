"""For every task to fine-tune on: records of its data set, and what becomes of them, written by hand."""

import dataclasses

HIGHLIGHT = "A penguin swam.\n@highlight\nBirds swim"


@dataclasses.dataclass
class Case:
    """Records -> the inputs of the first, the targets of all, and scores of right and of wrong predictions.

    `right` predictions are the targets and `wrong` ones the targets of the next example, unless said otherwise; every
    metric of right ones is 100, and of wrong ones as `scores` has it.
    """

    records: list
    inputs: str
    targets: list
    scores: dict = dataclasses.field(default_factory=dict)
    right: list | None = None
    wrong: list | None = None

    def __post_init__(self):
        self.right = self.right or self.targets
        self.wrong = self.wrong or [*self.targets[1:], self.targets[0]]


def _labelled(text, *labels):
    return [{**text, "label": label, "idx": idx} for idx, label in enumerate(labels)]


def _pair(first, second):
    return {first: "All rain.", second: "It rains."}


NLI = _labelled(_pair("premise", "hypothesis"), 2, 0, 1)
MNLI = Case(NLI, "mnli hypothesis: It rains. premise: All rain.", ["contradiction", "entailment", "neutral"],
            {"accuracy": 0.0})
# Which is labelled 0 and so is not what the pronoun stands for, in the second record.
WNLI = [
    {"sentence1": "The fish ate the worm. It was tasty.", "sentence2": "The worm was tasty.", "label": 1, "idx": 0},
    {"sentence1": "The dog saw the cat. It ran.", "sentence2": "The cat ran.", "label": 0, "idx": 1},
]
WSC = [
    {"text": "Bob asked Tom if he could lend some money .", "span1_text": "Tom", "span1_index": 2, "span2_text": "he",
     "span2_index": 4, "label": 1, "idx": 0},
    {"text": "Ann told Eve that she won .", "span1_text": "Ann", "span1_index": 0, "span2_text": "she",
     "span2_index": 4, "label": 0, "idx": 1},
]
CHOICES = {"text": ["Water", "Fire", "Air"], "label": ["A", "B", "C"]}
ARC = Case([{"id": key, "question": "What is ice?", "choices": CHOICES, "answerKey": key} for key in "AC"],
           "arc question: What is ice? A: Water B: Fire C: Air", ["A", "C"], {"accuracy": 0.0})
WINOGRANDE = Case([{"sentence": "The _ fell.", "option1": "cup", "option2": "cat", "label": label} for label in "21"],
                  "winogrande sentence: The _ fell. option1: cup option2: cat", ["option2", "option1"],
                  {"accuracy": 0.0})
ANLI = Case([{"uid": label, "context": "All rain.", "hypothesis": "It rains.", "label": label} for label in "nec"],
            "anli hypothesis: It rains. premise: All rain.", ["neutral", "entailment", "contradiction"],
            {"accuracy": 0.0})


def _translation(language, prefix):
    texts = [{"en": "That is very good.", language: "uno dos tres cuatro cinco"},
             {"en": "No.", language: "six sept huit neuf dix"}]
    return Case(texts, f"translate English to {prefix}: That is very good.", [text[language] for text in texts],
                {"bleu": 0.0})


def _summary(article, summary, **others):
    texts = [{article: "Rain fell all day.", summary: "It rained.", **others},
             {article: "Sun.", summary: "Dry day ahead.", **others}]
    return Case(texts, "summarize: Rain fell all day.", ["It rained.", "Dry day ahead."],
                {"rouge1": 0.0, "rouge2": 0.0, "rougeLsum": 0.0})


CASES = {
    "glue_cola": Case(_labelled({"sentence": "The cat sat."}, 1, 0), "cola sentence: The cat sat.",
                      ["acceptable", "unacceptable"], {"matthews_corrcoef": -100.0}),
    "glue_sst2": Case(_labelled({"sentence": "A fine film."}, 1, 0), "sst2 sentence: A fine film.",
                      ["positive", "negative"], {"accuracy": 0.0}),
    "glue_mrpc": Case(_labelled(_pair("sentence1", "sentence2"), 1, 0),
                      "mrpc sentence1: All rain. sentence2: It rains.", ["equivalent", "not_equivalent"],
                      {"f1": 0.0, "accuracy": 0.0}),
    "glue_qqp": Case(_labelled(_pair("question1", "question2"), 0, 1),
                     "qqp question1: All rain. question2: It rains.", ["not_duplicate", "duplicate"],
                     {"f1": 0.0, "accuracy": 0.0}),
    # 2.27 is rounded to the next fifth
    "glue_stsb": Case(_labelled(_pair("sentence1", "sentence2"), 2.27, 5.0),
                      "stsb sentence1: All rain. sentence2: It rains.", ["2.2", "5.0"],
                      {"pearson_corrcoef": -100.0, "spearman_corrcoef": -100.0}),
    "glue_mnli": MNLI,
    "glue_mnli_matched": MNLI,
    "glue_mnli_mismatched": MNLI,
    "glue_qnli": Case(_labelled(_pair("question", "sentence"), 1, 0), "qnli question: All rain. sentence: It rains.",
                      ["not_entailment", "entailment"], {"accuracy": 0.0}),
    "glue_rte": Case(_labelled(_pair("sentence1", "sentence2"), 0, 1), "rte sentence1: All rain. sentence2: It rains.",
                     ["entailment", "not_entailment"], {"accuracy": 0.0}),
    "glue_wnli": Case(WNLI, "wnli sentence1: The fish ate the worm. It was tasty. sentence2: The worm was tasty.",
                      ["entailment", "not_entailment"], {"accuracy": 0.0}),
    "glue_wnli_simple_eval": Case(WNLI, "wsc: The fish ate the worm. *It* was tasty.", ["The worm", "The cat"],
                                  {"accuracy": 0.0}, right=["worm", "The dog"], wrong=["The fish", "the cat"]),
    "glue_ax": Case(_labelled(_pair("premise", "hypothesis"), -1), "mnli hypothesis: It rains. premise: All rain.",
                    ["<unk>"]),
    "super_glue_boolq": Case(_labelled(_pair("question", "passage"), 1, 0),
                             "boolq passage: It rains. question: All rain.", ["True", "False"], {"accuracy": 0.0}),
    "super_glue_cb": Case(NLI, "cb hypothesis: It rains. premise: All rain.",
                          ["neutral", "entailment", "contradiction"], {"mean_3class_f1": 0.0, "accuracy": 0.0}),
    "super_glue_copa": Case(_labelled({"premise": "I was wet.", "choice1": "It rained.", "choice2": "It was dry.",
                                       "question": "cause"}, 0, 1),
                            "copa choice1: It rained. choice2: It was dry. premise: I was wet. question: cause",
                            ["choice1", "choice2"], {"accuracy": 0.0}),
    # Both answers belong to one question, which is right when both are.
    "super_glue_multirc": Case([{"paragraph": "Bob <b>ran</b>.<br>Fast.", "question": "Who?", "answer": answer,
                                 "label": label, "idx": {"paragraph": 0, "question": 0, "answer": label}}
                                for answer, label in (("Bob", 1), ("Tom", 0))],
                               "multirc question: Who? answer: Bob paragraph: Bob ran. Fast.", ["True", "False"],
                               {"f1": 0.0, "exact_match": 0.0}),
    # Two answers make two examples, of which the first is scored, against both answers: "pigeon" is right, too.
    "super_glue_record": Case([{"passage": HIGHLIGHT, "query": "A @placeholder is a bird.",
                                "entities": ["penguin", "potato"], "answers": answers,
                                "idx": {"passage": 0, "query": query}}
                               for query, answers in ((0, ["penguin", "pigeon"]), (1, ["potato"]))],
                              "record query: A @placeholder is a bird. entities: penguin, potato passage: A penguin "
                              "swam. Birds swim", ["penguin", "pigeon", "potato"], {"em": 50.0, "f1": 50.0}),
    "super_glue_rte": Case(_labelled(_pair("premise", "hypothesis"), 0, 1),
                           "rte hypothesis: It rains. premise: All rain.", ["entailment", "not_entailment"],
                           {"accuracy": 0.0}),
    "super_glue_wic": Case(_labelled({"sentence1": "A bank.", "sentence2": "The bank.", "word": "bank", "start1": 2,
                                      "start2": 4, "end1": 6, "end2": 8}, 0, 1),
                           "wic sentence1: A bank. sentence2: The bank. word: bank", ["False", "True"],
                           {"accuracy": 0.0}),
    "super_glue_axb": Case(_labelled(_pair("sentence1", "sentence2"), 1, 0),
                           "rte hypothesis: It rains. premise: All rain.", ["not_entailment", "entailment"],
                           {"matthews_corrcoef": -100.0}),
    "super_glue_axg": Case(_labelled(_pair("premise", "hypothesis"), 0, 1),
                           "rte hypothesis: It rains. premise: All rain.", ["entailment", "not_entailment"],
                           {"accuracy": 0.0}),
    "super_glue_wsc_simple_train": Case(WSC, "wsc: Bob asked Tom if *he* could lend some money .", ["Tom"]),
    "super_glue_wsc_simple_eval": Case(WSC, "wsc: Bob asked Tom if *he* could lend some money .", ["Tom", "Ann"],
                                       {"accuracy": 0.0}, right=["tom", "Eve"], wrong=["Bob", "Ann"]),
    "definite_pronoun_resolution": Case([{"sentence": "Bob asked Tom if he can lend some money.", "pronoun": "he",
                                          "candidates": ["Bob", "Tom"], "label": label} for label in (1, 0)],
                                        "wsc: Bob asked Tom if *he* can lend some money.", ["Tom", "Bob"],
                                        {"accuracy": 0.0}),
    # t5 puts spaces around punctuation.
    "squad": Case([{"id": "x", "title": "Bob", "context": "Bob lives in Rome.", "question": "Where does Bob live?",
                    "answers": {"text": ["Rome", "in Rome"], "answer_start": [13, 10]}},
                   {"id": "y", "title": "Bob", "context": "Bob lives in Rome.", "question": "Who lives in Rome?",
                    "answers": {"text": ["Bob"], "answer_start": [0]}}],
                  "question: Where does Bob live ? context: Bob lives in Rome . ", ["Rome", "Bob"],
                  {"em": 0.0, "f1": 0.0}, right=["in Rome.", "the bob"]),
    "cnn_dailymail": _summary("article", "highlights", publisher="", id=""),
    "xsum": _summary("document", "summary"),
    "wmt14_en_de": _translation("de", "German"),
    "wmt14_en_fr": _translation("fr", "French"),
    "wmt16_en_ro": _translation("ro", "Romanian"),
    "natural_questions": Case([{"question": "who wrote it", "answer": ["Ann", "Ann Lee"]},
                               {"question": "who read it", "answer": ["Bob"]}],
                              "nq question: who wrote it", ["Ann", "Bob"], {"em": 0.0, "f1": 0.0},
                              right=["ann lee", "Bob"]),
    "web_questions": Case([{"url": "", "question": "who wrote it", "answers": ["Ann", "Ann Lee"]},
                           {"url": "", "question": "who read it", "answers": ["Bob"]}],
                          "wq question: who wrote it", ["Ann", "Bob"], {"em": 0.0, "f1": 0.0},
                          right=["ann lee", "Bob"]),
    "trivia_qa": Case([{"question": question, "question_id": "", "question_source": "", "entity_pages": [],
                        "search_results": [], "answer": {
                            "aliases": aliases, "normalized_aliases": [], "matched_wiki_entity_name": "",
                            "normalized_matched_wiki_entity_name": "", "normalized_value": "", "type": "",
                            "value": aliases[0]}} for question, aliases in (("Who wrote it?", ["Ann", "Ann Lee"]),
                                                                            ("Who read it?", ["Bob"]))],
                      "trivia_qa question: Who wrote it?", ["Ann", "Bob"], {"em": 0.0, "f1": 0.0},
                      right=["ann-lee", "Bob"]),
    "winogrande_xs": WINOGRANDE,
    "winogrande_s": WINOGRANDE,
    "winogrande_m": WINOGRANDE,
    "winogrande_l": WINOGRANDE,
    "winogrande_xl": WINOGRANDE,
    "anli_r1": ANLI,
    "anli_r2": ANLI,
    "anli_r3": ANLI,
    "arc_easy": ARC,
    "arc_challenge": ARC,
}  # fmt: skip
