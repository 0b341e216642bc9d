"""The golden record: what every way through every public function answered, beside what is true.

``ways`` forces a way, ``rows`` runs recipes of the campaign and keeps what came out, ``compare`` holds a new
run against the record. ``python -m tests.golden record`` writes the record of this machine's ways,
``python -m tests.golden compare`` runs them again and says whether they are equal or sounder.
"""
