"""Made-up word problems, for trees where no data is at hand."""

QUESTIONS = (
    "A baker makes 4 trays of 12 rolls each morning. He sells 39 of them before noon. How many rolls are left?",
    "Ines saves 15 dollars a week for 6 weeks and then spends a third of it. How many dollars does she have left?",
    "A bus starts with 18 people. At the first stop 7 get off and 12 get on, at the second 9 get off. "
    "How many people are on the bus now?",
    "Tomas reads 14 pages an hour. He reads for 3 hours on Friday and for twice as long on Sunday. "
    "How many pages does he read?",
    "A farm has 25 hens. Each lays 5 eggs a week. The farmer packs the eggs of two weeks in boxes of 10. "
    "How many boxes does she fill?",
    "Three friends share the cost of a tent for 96 dollars and of food for 54 dollars equally. "
    "How many dollars does each one pay?",
    "A tank holds 240 liters. A pump empties 16 liters a minute, and a tap fills in 4 liters a minute. "
    "After how many minutes is the full tank empty?",
    "Mira is twice as old as Jon, and Jon is 5 years older than Ada, who is 8. How old are the three together?",
)
