"""Wrong values, options and files with the exit code and the message that each has."""

import gzip

from tests.scoring.arpa_files import NGrams

WRONG_VALUES = """\
--model.hidden=0 --model.hidden=-4 --model.hidden=1.5 --model.hidden=many --model.hidden=1e99
--model.hidden=99999999999999999999 --model.layers=0 --model.layers=20000 --model.dropout=1.5
--model.dropout=nan --model.dropout=-0.1 --model.backbone=gru --model.init_range=0 --model=12
--model.input_pieces=3 --model.count_word_dropout=-1 --output.branching=1 --output.arity=1
--output.cutoffs=[0] --output.num_samples=0 --output.backend=cuda --output.tail_dropout=2
--word_table.dtype=fp8 --word_table.optimizer=lion --word_table.lr=0 --word_table.tied=maybe
--optim.lr=0 --optim.lr=-1 --optim.lr=inf --optim.lr=fast --optim.betas=[0.9]
--optim.betas=[0.9,1.5] --optim.clip=-1 --optim.momentum=2 --optim.schedule=linear
--optim.warmup_steps=-1 --optim.decay=2 --train.max_steps=0 --train.max_minutes=0
--train.batch_size=0 --train.seq_len=0 --train.accumulate=0
--train.precision=int8 --train.accelerator=tpu --train.devices=0
--train.strategy=fsdp --tokenizer.character_coverage=0.9 --train.threads=0 --train.threads=100000
--train.keep_checkpoints=-1 --train.cuda_graph=maybe --seed=010 --train.max_minutes=1:30
--train.skip_nonfinite_steps=-1 --train.checkpoint_every_steps=0 --train.val_every_steps=0
--log.every_steps=0 --log.wandb=yes --seed=-1 --seed=x --data.format=xml --data.sequences=tree
--data.split=random --tokenizer.kind=bytes --tokenizer.vocab_size=0 --tokenizer.min_count=0
--tokenizer.character_coverage=2 --classes.method=magic --classes.num_word_classes=0
--classes.depth=1 --classes.seed=-1 --classes.dimensions=0 --classes.shortlist=-1
"""
"""Each is a usage error, code 2, whose message names the key."""
BAD_INPUTS = """\
2 |  | the following arguments are required: COMMAND
2 | fly | unknown command fly: the commands are new, prepare, train, evaluate,
2 | new {folder}/new.yaml | the following arguments are required: --text$
3 | new {folder}/new.yaml --text={binary} | binary.txt
2 | config model.hiden | unknown key model.hiden; did you mean model.hidden?
2 | train {tiny} --frob | --frob
2 | train {tiny} --model.hiden=3 | lm: --model.hiden=3: unknown key model.hiden; did you
2 | train {tiny} more | expected an override --section.key=value, got 'more'
2 | train {tiny} --model.layers=3 -- | expected an override --section.key=value, got '--'
2 | train {tiny} --train.max_steps 300 | --train.max_steps: write --train.max_steps=300
2 | train {tiny} --train.max_steps | --train.max_steps: write --train.max_steps=VALUE
2 | train {tiny} --device cpu | --device: write --train.accelerator=cpu
2 | train {tiny} --threads=2 | --threads=2: write --train.threads=2
2 | train {tiny} --train.max_minutes=1 --train.max_minutes=x | --train.max_minutes=x:
2 | train r --no-progres | unknown option --no-progres; did you mean --no-progress?
2 | train {tiny} --resume | argument --resume: expected one argument
4 | train {tiny} {data} --resume=absent.ckpt | --resume absent.ckpt: no such checkpoint
2 | train {tiny} --optim.table_lr=1 | unknown key optim.table_lr; it is now word_table.lr
2 | classes {run} --plot p.png | unknown option --plot; it is no longer available
2 | train {list} | list.txt
2 | train {absent} | absent.txt: cannot read the configuration: No such file or directory
2 | train {run} --model.hidden=16 | already contains a run
2 | train {tiny} --run_dir={run} | contains a run: continue it with --resume auto, or choose another
2 | train {tiny} {data} --train.batch_size=9999 | train.seq_len = 8 require at least 9999
2 | train {tiny} {data} --output.tree=oak | output.tree: oak is neither a tree (full, two_
2 | train {tiny} {data} --output.tree={tree} | tree.txt:1: 'thé' is not in the vocabulary
2 | train {tiny} {data} --output.tree={utf16} | utf16.txt is in UTF-16: convert it, iconv -f UTF-16
2 | train {tiny} {data} --output.tree={latin1} | latin1.txt: invalid UTF-8: if it is Western
2 | train {tiny} {data} --output.tree={gzip} | gzip.txt is compressed,
2 | train {tiny} {data} --output.tree=adaptive --output.cutoffs=[5,5] | must increase within 1 …
3 | prepare {tiny} --data.files.train={binary} | binary.txt
3 | prepare {tiny} --data.files.train={text} --data.format=json | text.txt
3 | prepare {tiny} --classes.method=file --classes.file={absent} | absent.txt cannot be read: No
3 | classes {tiny} | data is not a prepared folder: it has no meta.json
2 | classes {folder} | no run here (config.yaml is missing): lm train CONFIG begins
4 | extend {tiny} | tiny.yaml is a file, not the folder of a run
2 | extend {pieces} --run_dir=x --text={text} | lm extend requires tokenizer.kind: words
2 | extend {run} --run_dir=x --text={text} --min-count=2 | text.txt (--min-count 2)
2 | extend {run} --run_dir=x --text={text} --min-count=0 | --min-count: must be at least 1
2 | extend {run} --run_dir=x --text={text} --tokenizer.min_count=2 | tokenizer.min_count: 1 → 2
2 | extend {run} --text={text} | lm extend writes another run: name its folder, --run_dir=FOLDER
2 | extend {run} --run_dir={folder} --text={text} | empty already exists
2 | extend {run} --run_dir=x --data.files.train={text} --min-count=9 | require --text
2 | extend {run} --run_dir=x --text=caf\udce9 | caf\\udce9': not UTF-8
3 | extend {run} --run_dir=x --text={absent} | absent
3 | extend {run} --run_dir=x --text={binary} | binary.txt
2 | train {run} --resume=auto --data.keep_empty_lines=false | in another folder, with --init-from
2 | train {tiny} --init-from | argument --init-from: expected one argument
4 | train {tiny} {data} --init-from={absent} | no trained model here
4 | train {tiny} {data} --init-from={tiny} | tiny.yaml is a file, not the folder of a run
2 | train {tiny} --init-from={run} --output.tree=full | (output.tree: two_level → full)
2 | train {tiny} --init-from={run} --model.hidden=16 --model.layers=1 --classes.shortlist=2 \
--model.backbone=transformer --tokenizer.lowercase=true --word_table.tied=true \
--data.sequences=independent --train.precision=64-true | has another model \
(classes.shortlist: 0 → 2, model.backbone: lstm → transformer, model.hidden: 12 → 16, \
model.layers: 2 → 1, tokenizer.lowercase: False → True, word_table.tied: False → True, \
data.sequences: stream → independent, train.precision: 32-true → 64-true)
2 | train {tiny} --init-from={pieces} | tokenizer.kind: sentencepiece → words
3 | train {tiny} {data} --init-from={run} | has data already, and --init-from prepares others
2 | evaluate | the following arguments are required: RUN
4 | evaluate {absent} | no trained model here (model.json is missing); there is no such folder
4 | evaluate {folder} | no trained model here (model.json is missing); `lm train CONFIG` trains one
2 | evaluate {run} --split=dev | argument --split: invalid choice: 'dev'
2 | evaluate r --splitt=test | unknown option --splitt=test; did you mean --split?
2 | evaluate r --split=test --text=t | argument --text: not allowed with
3 | evaluate {run} --text={absent} | absent
3 | evaluate {run} --text={binary} | binary.txt
3 | evaluate {run} --text={empty} | empty.txt
2 | evaluate {run} --k=3 | --k, --exclude, --users and --ranks require --ranking
2 | evaluate {run} --ranking --ranks=r.csv | --ranks r.csv: expected FILE.parquet in a folder
4 | evaluate {run} --checkpoint=absent.ckpt | absent.ckpt: cannot read the checkpoint: No such
4 | score {run} {text} --checkpoint={text} | text.txt is damaged, or not a checkpoint of sqrtlm
2 | evaluate {run} --ranking | --ranking requires data.sequences: independent
2 | evaluate {run} --ranking --by-frequency | --ranking excludes --text, --arpa, --ngram
2 | evaluate {run} --mixture=0.5 | --mixture requires --arpa
2 | evaluate {run} --mixture=1.5 --arpa={absent} | --mixture must be within 0 … 1
3 | evaluate {run} --arpa={text} | text.txt
2 | evaluate {run} --compare={run} --arpa=x | --compare excludes --arpa
2 | evaluate {run} --ngram --arpa=x | --arpa and --ngram exclude each other
2 | evaluate {run} --ngram --compare={run} | --compare excludes --ngram
2 | evaluate {run} --ngram --ranking | --ranking excludes --text, --arpa, --ngram
3 | evaluate {run} --ngram | has no n-gram model: run `lm ngram
2 | evaluate {run} --ngram --checkpoint=last | --checkpoint excludes --ngram
3 | score {run} {text} --ngram | has no n-gram model: run `lm ngram
2 | score {run} {text} --ngram --details | --ngram excludes --details
3 | rescore {run} {nbest} --lm-weight=1 --ngram | has no n-gram model
2 | ngram {run} --order=1 | --order must be within 2 … 10, got 1
2 | ngram {run} --order=11 | --order must be within 2 … 10, got 11
2 | ngram {run} --prune 1 | --prune 1: expected at most 5 numbers, the first one 0, none less
2 | ngram {run} --prune 0 2 1 | --prune 0 2 1: expected at most 5
2 | ngram {run} --prune 0 0 0 --order=2 | --prune 0 0 0: expected at most 2 numbers
2 | ngram {run} --prune x | argument --prune: invalid int value: 'x'
2 | ngram {run} --mixture=-1 | --mixture must be within 0 … 1
4 | ngram {folder} | no trained model here
2 | score {run} {text} --cache | --cache and --dynamic require --stream
2 | score {run} {text} --stream --cache --details | --cache excludes --details
2 | evaluate {run} --cache --ranking | --ranking excludes
2 | evaluate {items} --dynamic | --dynamic requires a text, but
4 | export {folder} {folder}/x | no trained model here
2 | export {run} {run} | exists: an export is a new folder
2 | export {run} {folder}/x --int8 | --int8 requires --onnx
2 | export {run} {folder}/x --hf --onnx | --hf excludes --bf16 and --onnx
2 | export {run} {folder}/x --hf | --hf requires model.backbone: transformer
4 | report {folder} | no trained model here
6 | report {run} --output=. | . cannot be written: it is not a file that can be replaced
2 | evaluate {run} --threads=9999 | argument --threads: must be at most 1024, got 9999
3 | score {run} {empty} | empty.txt
3 | score {run} 'no  such.txt' | no  such.txt cannot be read
3 | score {run} {empty} --stream | empty.txt
2 | score {run} --ids {text} more | unknown argument more
2 | new {folder}/new.yaml --text={text} --train.max_steps=9 | --train.max_steps=9: keys are set in
3 | score {run} --ids {ids} --level=summary | ids.txt, line 2: expected an id, a tab or space, and
2 | score {run} {text} --details --format=kenlm | --details requires
2 | score {run} {text} --details --level=sentence | --details requires
2 | score {run} {text} --stream --stream-by-id | --stream and --stream-by-id exclude each other
2 | score {run} {text} --level=token | --level token requires --format tsv or json
2 | score {run} {text} --open-vocabulary --vocabulary-size=99 | not allowed with argument
2 | score {run} {text} --vocabulary-size=3 | vocabulary size 3: expected at least 2
2 | score {run} {text} --vocabulary-size=2305843009213693952 | and at most 1152921504606846976
2 | score {pieces} {text} --vocabulary-size=99 | a vocabulary size applies to models of words, not
2 | recommend {run} | lm recommend requires --history or --events
4 | recommend {absent} --history=- | no trained model here
2 | recommend {run} --history=- | recommending requires data.sequences: independent
2 | generate {run} --model.hidden=3 | unknown option --model.hidden=3
2 | generate {run} --tokens=0 | argument --tokens: must be at least 1, got 0
2 | generate {run} --tokens=1.5 | argument --tokens: must be an integer, got '1.5'
2 | generate {run} --top-p=2 | generate: top_p must be
2 | generate {run} --prompt=a --stop= | a stop string must not be empty
2 | generate {run} --prompt=a --tokens=100000000000 | the texts need 6,400 GB of memory
2 | generate {run} --beams=1000000000 | the beams need
2 | generate {run} --beams=2 --top-k=3 | --top-k cannot be combined with --beams
2 | generate {run} --beams=2 --temperature=0 | --temperature cannot be combined with --beams
2 | generate {run} --beams=2 --seed=0 | --seed cannot be combined with --beams
2 | generate {run} --beams=2 --spell-unk | --spell-unk cannot be combined with --beams
2 | generate {run} --beams=2 --samples=3 | --samples 3 requires as many --beams
2 | generate {run} --length-penalty=1 | --length-penalty requires --beams
2 | generate {run} --allow-unk --spell-unk | --allow-unk and --spell-unk exclude each other
2 | generate {run} --prompt=a --prompts=b | not allowed with argument --prompt
3 | generate {run} --prompts={empty} | empty.txt: no prompts
3 | generate {run} --prompts={latin1} | latin1.txt, line 1: invalid UTF-8
3 | generate {run} --prompts={empty} --line-buffered | empty.txt: no prompts
2 | generate {run} --prompt=- --line-buffered | --line-buffered requires --prompts
3 | rescore {run} {text} --lm-weight=1 | text.txt
2 | rescore {run} {nbest} | give --tune LIST REFERENCES, or --lm-weight
2 | rescore {run} {nbest} --lm-weight=-1 | --lm-weight must be at least 0, and
2 | rescore {run} {nbest} --lm-weight=1e308 | a weighted sum of scores overflows: choose smaller
2 | rescore {run} {nbest} --lm-weight=1 --first-pass-share=2 | must be within 0 … 1
2 | rescore {run} {nbest} --lm-weight=1 --first-pass-share=0.5 | has no scores of the first pass
2 | rescore {run} {nbest} --lm-weight=1 --mixture=0.5 | --mixture requires a second model
4 | rescore {folder} {nbest} --lm-weight=1 | no trained model here
2 | rescore {run} {nbest} --lm-weight=1 --beam=3 | --beam applies to lattices
3 | rescore {run} {nbest} --lm-weight=1 '--non-words=(' | --non-words '(': no regular expression
3 | rescore {run} {nbest} --lm-weight=1 --references={twice} | line 3: u1 has a reference already
3 | rescore {run} {nbest} --lm-weight=1 --references={wordless} | the references have no words
3 | rescore {run} {nbest} --lm-weight=1 --references={other_said} | no reference for utterance u1 of
3 | rescore {run} {nbest} --lm-weight=1 --acoustic-costs={costs} | this one has tabs
2 | rescore {run} {nbest} --lm-weight=1 --lm-costs={costs} | requires --acoustic-costs
2 | rescore {run} {nbest} --tune {nbest} {said} --lm-weight=1 | --tune finds the weights
2 | rescore {run} {nbest} --tune {nbest} - --references=- | stdin (-) can be only one of the files
2 | rescore {run} {nbest} --tune {nbest} {said} | u1 is in {nbest} and in {nbest}: weights
2 | rescore {run} {nbest} --tune {other} {other_said} | other.txt has 0 scores per hypothesis and
2 | config hidden | unknown key hidden; did you mean model.hidden?$
2 | config modle | unknown key modle; did you mean model?$
2 | config model. | unknown key model.; did you mean model?$
2 | config model.tied | unknown key model.tied; it is now word_table.tied$
2 | config output.bias | unknown key output.bias; it is no longer available$
2 | config '' | unknown key $
2 | train {tiny} model.hidden=3 | expected an override --section.key=value, got 'model.hidden=3'
2 | train {tiny} --=3 | expected an override --section.key=value, got '--=3'
2 | train {tiny} --name.first=3 | --name.first: name is not a section
2 | train {tiny} --seed=a\x01 | --seed: not valid YAML: … #x0001: special … allowed at position 1
2 | train {tiny} --name=a\x01 | name must be a plain file name, got 'a\\x01'
2 | train {tiny} --name=caf\udce9 | --name='caf\\udce9': not UTF-8
2 | train {tiny} {data} --train.accelerator=gpu | gpu, train.devices: 1: expected at most 0
2 | train {tiny} {data} --output.backend=triton | output.backend: triton requires a GPU
2 | train {tiny} {data} --output.backend=triton --train.accelerator=cpu | triton requires a GPU
2 | train {tiny} {data} --train.precision=16-mixed | 16-mixed requires a GPU; use bf16-mixed
2 | train {tiny} {data} --train.precision=16-mixed --train.accelerator=cpu | requires a GPU
2 | train {tiny} --optim.schedule=no | 'constant', 'cosine', 'step' or 'plateau', got 'no'
2 | train utf16.txt | the configuration: … iconv -f UTF-16 -t UTF-8 … utf16.txt > NEW$
2 | train gzip.txt | gzip.txt: cannot read the configuration: it is compressed, … : decompress it$
2 | train nested.yaml | nested.yaml: not valid YAML: values are nested too deeply$
2 | new words.txt --text=words.txt | words.txt already exists: choose another name$
3 | new my.yaml --text=. | .: a folder: give a file$
3 | new my.yaml --text=- | -: give a file, which is read more than once$
3 | new my.yaml --text=none.txt | none.txt: no such file$
3 | new my.yaml --text=words.txt --test=no.txt | no.txt: no such file$
2 | new .yaml --text=words.txt | name must be a plain file name
6 | new words.txt/a.yaml --text=words.txt | words.txt cannot be written: … is a file, not a folder$
3 | new my.yaml --text=nested.json | nested.json cannot be read: RecursionError
3 | new my.yaml --text=words.txt --text-field=text | has no column text: leave out --text-field$
2 | new my.yaml --text=words.txt --items u i t --text-field=u | --items excludes --text-field
2 | new my.yaml --text=words.txt --items u | --items: expected USER ITEM [TIME], got 1
2 | new my.yaml --text=words.txt --items u i t | plain text has no columns
3 | prepare abc.txt --data.files.train=null | data.files.train is not set: expected the files
3 | prepare abc.txt | data.files.train: there is no file … x: names are relative to the current \
folder, or to data.dir if it is given$
3 | prepare abc.txt --data.dir=empty | data.files.train: there is no file … empty/x$
3 | prepare abc.txt --data.files.train=empty | data.files.train: the folder empty has no files$
3 | prepare abc.txt {json} --data.files.train=many.json | is 'text': … has only the columns 'n'
3 | prepare abc.txt {words} --tokenizer.vocab_size=2 | is 2: expected at least 3, <unk> and <eos>
3 | prepare abc.txt {words} --classes.shortlist=11 | classes.shortlist = 11 is more than 5 words
3 | prepare abc.txt {words} '--classes={{method: embedding, max_words: 1}}' | \
classes.max_words: 2 … 2 words, but 5 are to be clustered
2 | classes {tiny} {data} --output.tree=full | output.tree: full has no word classes to report on$
2 | classes {tiny} {data} --output.tree=adaptive | adaptive has no word classes to report on$
3 | classes copy --classes.method=random | copy/data was prepared with other settings \
(classes.method: exchange → random): run `lm prepare` with these settings first$
3 | info copy --classes.method=random | (classes.method: exchange → random): run `lm prepare` with
3 | classes {tiny} --run_dir=copy --classes.method=random | (classes.method: exchange → random): run
3 | info {tiny} --run_dir=copy --classes.method=random | (classes.method: exchange → random): run
3 | evaluate {letters} --split=valid | has no valid split (prepared: train, test): training takes \
its files from data.files.valid, lm evaluate any text with --text FILE$
2 | evaluate {letters} --split=train --arpa=x | has no validation split to tune on: give --mixture$
3 | evaluate {run} --text=- --arpa=- --mixture=0.5 | stdin (-) can be only one of the files$
2 | evaluate {run} --compare={ends} | requires a text, but … has independent sequences
2 | score {ends} --stream | requires a text, but … has independent sequences
2 | evaluate {items} --by-frequency | has independent sequences
2 | evaluate {items} --ranking --k=21 | --k 21: the cat
2 | score {items} user.txt | has items, but no end of a sequence: use
2 | rescore {items} codes.txt --lm-weight=1 | has items, but no end of a sequence: use
2 | extend {items} | --run_dir=FOLDER
2 | extend {items} --run_dir=x | has all items
2 | extend {items} --run_dir=empty | empty already exists
2 | extend {items} --run_dir=x --optim.lr=1 | the data alone, not optim.lr: 0.01 → 1.0
2 | extend {ends} --run_dir=x | data.predict_eos: false
2 | recommend {items} --history=user.txt --k=21 | --k 21: k must be within 1 … 20
3 | recommend {items} --history=nested.json | is not JSON
3 | recommend {items} --events=nosuch.csv | --events: there is no file … nosuch.csv$
3 | recommend {items} --history=user.txt --retired=words.txt | words.txt: no line is an item of
3 | evaluate {pieces} --mixture=0.5 --arpa=arpa.txt | has no unigram '▁ … a token for each piece
2 | score {run} - --stream --dynamic --line-buffered | --line-buffered excludes --dynamic
2 | score {transformer} - --stream --line-buffered | --line-buffered: the windows of a \
Transformer's text depend on its length$
2 | generate {run} '--prompt=a \udcff' | generate: the text 'a \\udcff' is not valid Unicode$
"""
"""The exit code, a command, and what its message has."""
TREE = "thé 0 0\ncat 0 1\n"
ARPA: NGrams = {
    **{("<s>",): (-1.0, -1.0), ("</s>",): (-1.0, 0.0), ("<unk>",): (-0.2, -1.0)},
    **{("the",): (-0.5, -1.0), ("qu",): (-1.0, 0.0), ("the", "</s>"): (-0.3, 0.0)},
}
FILES = {"binary": b"\xff\xfe\0", "empty": b"", "text": b"the cat\n", "list": b"- 1\n"}
FILES |= {"tree": TREE.encode(), "utf16": TREE.encode("utf-16"), "latin1": TREE.encode("latin-1")}
FILES |= {"gzip": gzip.compress(TREE.encode()), "ids": b"a\tthe cat\n\tthe dog\n"}
FILES |= {"nbest": b"u1\t-1\tthe cat\n", "said": b"u1 the cat\n", "twice": b"u1 the\n\nu1 cat\n"}
FILES |= {"other": b"u2\tthe\n", "other_said": b"u2 the\n", "costs": b"u1 1\n", "wordless": b"u1\n"}
FILES |= {"words": b"a b c a b c\n", "lines": b"the dog\n" * 40, "user": b'["item 3"]\n'}
FILES |= {"many.json": b'{"n": 1}\n' * 300 + b'{"text": 1}', "nested.json": b"[" * 100_000}
FILES |= {"nested.yaml": b"name: " + b"[" * 1200 + b"]" * 1200, "codes": b"u\t-1\titem%203\n"}
FILES["abc"] = b"name: abc\ndata: {files: {train: x}}\ntrain: {max_steps: 1, seq_len: 2}\n"
FILES["shop"] = b"""\
name: shop
data: {files: {train: x}, format: csv, sequences: independent, user_field: u, item_field: i,
  time_field: t}
train: {max_steps: 1}
"""
