"""The driver policies of paper 003 against each other.

The claim: results are the same under every policy, and the default policy does the least work.
"""
