from tot.tasks.blocksworld import Blocksworld as Blocksworld
from tot.tasks.blocksworld import DirectBlocksworld as DirectBlocksworld
from tot.tasks.creative_writing import CreativeWriting as CreativeWriting
from tot.tasks.game24 import Game24 as Game24
from tot.tasks.gsm8k import GSM8K as GSM8K
from tot.tasks.multiple_choice import MultipleChoice as MultipleChoice
