"""The measurement of parts in many settings: the plan, its runs, and the worths that they give."""
