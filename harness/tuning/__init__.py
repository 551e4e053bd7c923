"""Each method's own parameters: searched, stored with the evidence, used by runs."""
