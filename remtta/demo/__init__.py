"""An embedded classifier of road signs on a drive into bad weather."""
