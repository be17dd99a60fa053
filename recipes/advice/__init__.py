"""`octet plan`: what was asked, the planner's answer, and its forms: text, page, JSON. No torch."""
