"""Datasets of BERT and T5: whole sentences, some of whose words are masked."""
