"""What a constrained answer may say next: grammars compiled from JSON Schemas, regular expressions and choices.

Nothing here is imported before the first constrained request: llguidance and a vocabulary's trie cost 0.2 s.
"""
