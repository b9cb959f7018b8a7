"""Text with wrong labels: train on sparse tf-idf features, and list the labels to check.

python examples/text_tfidf.py
"""

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline

from warpi import NoisyLabelClassifier

TOPICS = {
    "delivery": "parcel late courier address tracking lost box arrived depot driver",
    "payment": "card charged refund invoice twice bank amount receipt price fee",
    "account": "password login email locked profile reset username code settings delete",
}
FILLER = [
    "hello",
    "please",
    "thanks",
    "the",
    "my",
    "it",
    "was",
    "again",
    "still",
    "cannot",
    "you",
    "when",
    "today",
    "help",
]


def messages(n: int, rng: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """Random messages to a shop: three words about the topic, eight others."""
    topics = rng.choice(list(TOPICS), n)
    return [" ".join([*rng.choice(TOPICS[t].split(), 3), *rng.choice(FILLER, 8)]) for t in topics], topics


def main(epochs: int = 20) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    texts, truth = messages(1500, rng)
    checked, checked_labels = messages(30, rng)
    new, new_labels = messages(500, rng)
    wrong = rng.random(len(truth)) < 0.4
    given = np.where(wrong, np.roll(list(TOPICS), -1)[[list(TOPICS).index(t) for t in truth]], truth)  # the next topic

    tfidf = TfidfVectorizer().fit(texts)
    model = NoisyLabelClassifier(epochs=epochs, random_state=0)
    model.fit(tfidf.transform(texts), given, tfidf.transform(checked), checked_labels)
    for row in model.label_quality_.argsort()[:3]:
        print(f"{given[row]:>8}?  {texts[row]}")
    accuracy = make_pipeline(tfidf, model).score(new, new_labels)
    return 100 * accuracy, float(roc_auc_score(~wrong, model.label_quality_))


if __name__ == "__main__":
    accuracy, auroc = main()
    print(f"test accuracy {accuracy:.1f} %, AUROC of finding the wrong labels {auroc:.3f}")
