"""Gates: scoring per request, the journal, the paired request bootstrap, the pilot and G2 verdicts."""
