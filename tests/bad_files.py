"""Files that commands refuse, with the exit code and the message of each content."""

BAD_FILES = r"""\
3 | rescore {run} x --lm-weight=1 | x
  u\n0 1 33 101 1.5,20\n1 2 7 102 2,1\n2 0,0\n | the words are numbers: … -f 4 words
  u\n0 1 w1 1,2\n1\n\nv\n0 1 9 101 1,2\n1\n | the words are numbers: … -f 4 words
  u\n0 1 w1 0.5\n1 2 w3 1.25\n2\n | line 2: expected … costs graph,acoustic … '0.5'
  u\n0 1 9 w1 1,2\n1 2 w2\n2\n | line 3: expected two states, a word and costs
  N=3 L=1\nI=0\nI=1\nJ=0 S=0 E=1 W=\\351\n | line 4: the bytes of \351 are not UTF-8
  N=3 L=1\nI=0\nI=1\nJ=0 S=0 E=1 W=new york\n | line 4: expected fields NAME=VALUE
  N=3 L=1\nI=0\nI=1\nJ=0 S=0 E=1 W="new york\n | line 4: … : a quotation mark is not closed
  id\ttext\nu1\tw1\n | the first line has names of columns, 'id\ttext': remove it
  w1\t-1.2\nw2\t-3.4\n | the last column has numbers alone, expected lines id TAB
  u\tw1\t-3.5\nu\tw1\tw2\n | line 1: expected a finite score, got 'w1'
  w1 w2\t7\n | id without spaces, got 'w1 w2'; expected lines id TAB scores TAB
  0 1 w1 0.5\n1 2 w3 1.25\n2\n | a key utterance-N … of other formats … , got '0'
  -1200.5 -30.2 2 w1 w2\n-1300 -31 1 w1\n | a key utterance-N … , got '-1200.5'
  u 1 0.00 0.30 w1 0.9\nu 1 0.30 0.30 w2\n | a key utterance-N … , got 'u'
  \n | the n-best list is empty
  a\t1\tthe\nb\tthe\n | line 2: expected an id, 1 scores and a hypothesis, got 0 scores
  a\t1\t2\t3\tw\n | line 1: expected an id, 2 scores and a hypothesis, got 3 scores
  u-1 -12.5 w1\nu-2 3.25 -1.5 w2\n | a number comes before the words of each line
  u-1 w1\nu-1 w2\n | line 2: u-1 is in the list already
  u-1 w1\nu-2\tw2\n | line 2: expected a tab, or a key utterance-N
  u \0B1234 | a NUL character: Kaldi's binary lattices as text: lattice-copy
  u\n0 1 the 1,1\n1 0 cat 1,1\n1\n | utterance u: a cycle through the node
  u\n0 1 the 1,1\n | line 1: utterance u: no end node
  u\n0 1 the 1,1\n5\n | utterance u: no arc leads to the end node 5
  u\n0 1 the 1,1\n2 3 cat 1,1\n3\n | utterance u: no path leads from the start
  u\n0 1 the 1,1\n1\n\nu\n0\n | utterance u has two lattices
  u\n0 1 the 1,1\n1\n\nu v\n0\n | line 5: expected the id of an utterance, got 'u v'
3 | rescore {run} x.slf --lm-weight=1 | x.slf
  N=2 L=1\nI=0\nI=1\nJ=0 S=0 E=7\n | line 4: the link has no node, or an unknown one: 7
  N=3 L=3\nI=0\nI=1\nI=2\nJ=0 S=0 E=1\nJ=1 S=1 E=2\nJ=2 S=2 E=1\n | a cycle through the node
  N=2 L=2\nI=0\nI=1\nJ=0 S=0 E=1\nJ=1 S=1 E=0\n | expected one start node, got none
  N=2 L=2\nI=0\nI=1\nJ=0 S=0 E=1\n | x.slf is damaged or incomplete: LINKS=2 in the header, and 1
  N=3 L=1\nI=0\nI=1\nJ=0 S=0 E=1\n | incomplete: NODES=3 in the header, and 2 of them
  N=2 L=1\nI=0\nI=1\nJ=0 S=0 E=1 a=-1 l=nan\n | line 4: expected a finite score, got 'nan'
  N=2 L=1\nI=0\nI=1\nJ=0 word S=0 E=1\n | line 4: expected fields NAME=VALUE, got 'J=0 word
  N=2 L=1\nI=0\nI=1\nJ=0 S=0 E=1\nI=5 L=sub\n | line 5: a lattice in a lattice is not supported
  start=a end=e\nI=a\nI=b\nJ=0 S=a E=b W=the\n | x.slf: no end node
  start=b end=a\nI=a\nI=b\nJ=0 S=a E=b W=the\n | no arc leads to
  base=-1\nI=0\nI=1\nJ=0 S=0 E=1 a=0.5\n | x.slf: expected base=0 or one above 1, got -1
  base=1\nI=0\nI=1\nJ=0 S=0 E=1 a=0.5\n | x.slf: expected base=0 or one above 1, got 1
  acscale=0\nI=0\nI=1\nJ=0 S=0 E=1 a=1\n | x.slf: expected acscale above 0, got 0
  base=0\nI=0\nI=1 W=the\nJ=0 S=0 E=1 a=-1\n | line 4: expected a probability, … , got '-1'
3 | evaluate {run} --text=text.txt --mixture=0.5 --arpa=arpa.txt | arpa.txt
  \\end\\=> | is not complete: it has no line \end
  ngram 2==>ngram 2=1 | its head states 11 2-grams, and 1 follow
  ngram 1=5=>ngram 1=4 | its head states 4 1-grams, and 5 follow
  ngram 2==>ngram 3= | its head states 0 2-grams, and 1 follow
  2-grams:\n=>2-grams:\n-1 a\n | expected log10 P, 2 words and
  2-grams:\n=>2-grams:\nx\ta b\n | line 14: expected log10 P
  2-grams:\n=>2-grams:\nNaN\tthe qu\n | line 14: expected log10 P, 2 words
  2-grams:\n=>2-grams:\n0.48\ta b\n | line 14: log10 P is 0.48, above 0
  1-grams:\n=>1-grams:\n1e-3\tx\n | line 7: log10 P is 0.001, above 0
  a comment=>iARPA | own format: convert it by compile-lm --text=yes … arpa.txt
  a comment=>qARPA 256 | is a quantized file of IRSTLM
  a comment=>blmt 2 7 9 | is a binary file of IRSTLM: … compile-lm --text=yes
  a comment=>mmap lm http://k | is a binary file of KenLM: give the ARPA file
  \\data\\=> | is not an ARPA file
  1=5=>1=6;;1-grams:\n=>1-grams:\n-1 the\t-1\n | lines 7 and 11 have the same
  2=1=>2=3;;2-grams:\n=>2-grams:\n-1 the qu\n\n-2\tthe qu\n | lines 14 and 16 have
  \\data\\\nngram 1=0\n\n\\1-grams:\n\\end\\\n | is damaged: it has no 1-grams
  a comment=>a | arpa.txt has no unigram 'cat', a word that the model has: estimate the n-gram
  qu=>cat;;</s>=>gnu | arpa.txt has no </s>
  2=1=>2=0\nngram 3=1;;-0.3\tthe </s>=>\\3-grams:\n-1\tqu qu qu | is damaged: it has no 2-grams
3 | evaluate {run} --text=abc.txt --mixture=0.5 --arpa=arpa.txt | arpa.txt
  \t<unk>=>\tgnu | arpa.txt has no <unk>, and the text has a word outside the vocabulary
3 | rescore {run} x --lm-weight=1 --acoustic-costs=costs.txt | x
  u\n0 1 the 1,1\n1\n | files of costs belong to n-best lists in Kaldi's layout$
3 | recommend {items} --history=x | x
  [1 | is not JSON
  [1.5] | expected items that are text
3 | prepare abc.txt {words} --classes.method=file --classes.file=x | x
  a\t1\n | 2 of the vocabulary's 5 words have no class, the first is 'b'
  a\t1\nb\t2\na\t2\n | x, line 3: 'a' already has another class
  a 1\n | x, line 1: expected word TAB class (mkcls), got 'a 1'
  a\t1\n\udcff\t2\n | x, line 2: invalid UTF-8 at byte 1
3 | prepare abc.txt {words} '--classes={{method: file, file: x, file_format: brown}}' | x
  01\ta\t3\n02\tb\t3\n | x, line 2: expected bit string TAB word TAB count
3 | prepare abc.txt {words} '--classes={{method: file, file: x, file_format: taxonomy}}' | x
  a\tx//y\n | x, line 1: expected word TAB class/subclass
  a\tx/y\nb\tx\na\tx\n | x, line 3: 'a' already has another class
3 | prepare abc.txt {words} '--classes={{method: file, file: x, file_format: srilm}}' | x
  X a b\n | x, line 1: expected class [probability] word
3 | prepare abc.txt {words} '--classes={{method: file, file: x, num_word_classes: 4}}' | x
  a\tX\nb\tY\nc\tX\n | classes.num_word_classes: 4 requested, … 3 classes
3 | prepare abc.txt {words} '--classes={{method: embedding, vectors: x}}' | x
  a 1 2\nb 1\n | line 2: expected a word and 2 numbers, got 'b 1'
  a x y\n | line 1: expected a word and numbers, got 'a x y'
  a nan 1\n | line 1: expected a word and numbers
  a 1e99 1\n | line 1: expected a word and numbers
  a 1 2\na 1 2\n | line 2: 'a' already has another vector
  z 1 2\n | no word of the vocabulary has a vector
2 | train abc.txt {words} --output.tree=x | x
  a 0\nb 1\n<unk> 2\n<eos> 3\n | no path for 1 words, the first of them 'c'
  a 0\nb 1\nd 2\n | x:3: 'd' is not in the vocabulary
  a 0\nb x\nc 1\n | x:2: expected child numbers, integers
  a 0\nb 1\nc 1 0\n<unk> 2\n<eos> 3\n | path of word 'b' ([1]) equals or begins
  a 0\nb 1\na 2\n | x:3: a has a path already
3 | prepare abc.txt --data.files.train=[words.txt,x] | x
  a\nb\udcff\n | x, line 2: invalid UTF-8 at byte 2 of the line (0xff): if
  a\n\nb \0\n | x, line 3: a NUL character$
  PAR1\x15 | x … the file is a parquet file: data.format: parquet and data.text_field read
3 | prepare abc.txt | x
   | data.files.train: the corpus has no line … x)
3 | prepare abc.txt {json} | x
  {"text": 1} | x, row 1: 1, not text, in 'text'$
  {"text": 1, "t": "a"} | row 1: 1, not text, in 'text'; columns of text: 't'$
  {"text": "a"}\n{"text": "\\u0000"} | x, row 2: a NUL character in 'text'$
  {"text": "a"}\n["a"] | x, line 2: expected JSON objects, got 'a'$
  {"text": "a"}\n{"text": "\\ud800"} | x, row 2: '\ud800' is half of a pair$
  [{"text": "\\ud83d\\ude00"}, {"\\udc00": 1}] | x, row 2: '\udc00' is half of a pa
  not json\n | x … ValueError: line 1 is not JSON: Expecting value
3 | prepare abc.txt --data.format=parquet | x
  not json\n | x cannot be read: ArrowInvalid: Parquet magic bytes not found
3 | prepare abc.txt --data.format=csv | x
  not json\n | x … expected a first line of names, separated by a comma, tab, sem
2 | prepare abc.txt --data.sequences=independent | x
  a b\n\na\tb\n | train, 'a\tb': a tab, expected none in the training split
  a <eos> b\n | train, 'a <eos> b': <eos> is no item
2 | prepare abc.txt {words} {lower} --data.sequences=independent --data.files.valid=x | x
  a\tb\ta\n | valid, 'a\tb\ta': a tab, expected at most
  a\tb <EOS> b\n | valid, … : <eos> is no item
2 | prepare shop.txt {json} | x
  {"u":"u","i":1.5,"t":1} | data.item_field i: expected text or integers, got double
  {"u":1,"i":1,"t":"10/06/2024"}\n{"u":2,"i":1,"t":"10/06/2024"} | x: data.time_field t: expected \
a number, or 2024-10-06 (ISO 8601), got 10/06/2024 in row 1
  {"u":1,"i":1,"t":"2024-10-06"}\n{"u":2,"i":1,"t":"soon"} | expected a time like 2024-10-06 of \
row 1, got soon in row 2
  {"u":"u","i":1,"t":Infinity} | t: expected a number, or 2024-10-06 (ISO 8601), got inf
  {"u":"u","i":1,"t":true} | t: expected a number, or 2024-10-06 (ISO 8601), got True
3 | prepare shop.txt {json} | x
  {"u":"u","i":10000000000000000000000000,"t":1} | x cannot be read: OverflowError
  {"u":"","i":1,"t":1} | x: rows without a value (data.user_field u: 1, the first in row 1; row
  {"u":"u","i":1,"t":" "} | x: rows without a value (data.time_field t: 1, the first in row 1; row
  {"u":"u","i":1,"t":1}\n{"u":null,"i":null,"t":2}\n{"u":"u","i":null,"t":3} | rows without \
a value (data.user_field u: 1, the first in row 2, data.item_field i: 2, the first in row 2; row \
1 is the first): remove them
2 | prepare shop.txt --data.split=leave_one_out | x
  u,i,t\nu0,0,1\n | no user has three events
2 | train shop.txt --data.split=leave_one_out | x
  u,i,t\n1,1,1\n1,2,2\n1,3,3\n1,4,4\n2,1,1\n2,2,2\n2,3,3\n2,4,4\n | \
2 items to predict, of which the training split has none
2 | prepare shop.txt --data.split=time | x
  u,i,t\n1,1,2024-02-01\n1,1,2024-02-03\n1,1,2024-02-03\n1,1,2024-02-03\n1,1,2024-02-03\n | \
data.valid_from 2024-02-03T00:00:00 and data.test_from 2024-02-03T00:00:00 leave a split empty: \
times are 2024-02-01T00:00:00 to 2024-02-03T00:00:00
2 | prepare shop.txt --data.split=time --data.test_from=30 | x
  u,i,t\n1,0,0\n1,0,1\n1,0,2\n1,0,3\n1,0,4\n1,0,5\n1,0,6\n1,0,7\n1,0,8\n | data.valid_from 7 and \
data.test_from 30
3 | prepare abc.txt --data.prepared_dir=copy/data --data.files.train=copy/data/x | copy/data/x
  the cat\n | copy/data/x is in the prepared folder: the corpus must be elsewhere$
3 | prepare abc.txt --data.prepared_dir=copy/data --data.files.train=**/x.tmp | copy/data/x.tmp
  the cat\n | copy/data/x.tmp is in the prepared folder: the corpus must be elsewhere$
3 | prepare abc.txt {words} --data.prepared_dir=own | own/vocab.txt
  mine\n | own/vocab.txt is not from a preparation and would be replaced: choose another data.prep
3 | prepare abc.txt {words} --data.prepared_dir=own | own/meta.json
  {"version": 3} | own/meta.json is not from a preparation and would be replaced: choose another
3 | prepare abc.txt {words} --data.prepared_dir=own | own/test.npy
  mine | own/test.npy is not from a preparation and would be replaced: choose another data.prep
2 | train x | x
  name: a\nmodle: {hidden: 3} | x: unknown key modle; did you mean model?$
  name: a\noptim: {max_steps: 3} | x: unknown key optim.max_steps; did you mean train.max_steps?$
  name: a\nmodel: {hidden: 0} | model.hidden: Input should be greater than 0, got 0$
  name: a\nmodel: {dropout: 1.0} | model.dropout: Input should be less than 1, got 1.0$
  seed: !!timestamp 2021-01-01 | x: a value is neither a number nor text
  train: {max_steps: 5} | x: name is missing$
  - a\n- b\n | x: expected sections with keys, got list$
  name: a\nname: other\n | x: not valid YAML: … key 'name' given twice
  seed: 2\nmodel: {hidden: 3\n | x: not valid YAML: … line 3
  model: {seed: 1}\nseed: 2\nmodel: {} | not valid YAML: key 'model' given twice (line 3, column 1)$
  name: &a [*a]\n | x: not valid YAML: values are nested too deeply$
  model: !!python/name:os.getcwd\n | x: not valid YAML: … python/name
  seed: !!int x\n | x: not valid YAML: a value is not of its type: invalid literal for int()
  seed: !!bool x\n | x: not valid YAML: a value is not of its type: 'x'
  model: !!map [a]\n | x: not valid YAML: a value is not of its type: cannot unpack
  name: caf\udce9\n | cannot read the configuration: invalid UTF-8: … iconv -f WINDOWS-1252
  n\0a\0m\0e\0:\0 \0\udce9\0\n\0 | x: cannot read the configuration: … iconv -f UTF-16LE
  \0\0\0n\0\0\0a\0\0\0m\0\0\0e\0\0\0:\0\0\0 \0\0\0\udce9\0\0\0\n | cannot read … iconv -f UTF-32BE
  PAR1\x15 | x: cannot read the configuration: it is a parquet file: expected YAML$
3 | new my.yaml --text=lines.txt --valid=x | x
  \n | x: the text has no word
  \udcff | x, line 1: invalid UTF-8
3 | new my.yaml --text=a.jsonl | a.jsonl
  {"title": "the dog", "body": "the cat sat"}\n{"title": "the dog", "body": "the cat sat"} | \
a.jsonl: name the column … --text-field=NAME, of 'title', 'body'; those of
  {"a": "user 1", "b": "So What", "c": 1} | a.jsonl: name … 'a', 'b'; those … 'a', 'b', 'c'
3 | new my.yaml --text=a.json | a.json
  {"n": 1} | a.json: name the column … : none of 'n' is one; those of
  the cat | a.json cannot be read: ValueError: line 1 is not JSON: Expecting
  [{"text": "a"}, | a.json cannot be read: JSONDecodeError
3 | new my.yaml --text=a.json --text-field=id | a.json
  {"id": 0, "text": "a cat"}\n{"id": 1, "text": "a b"} | 'id' is no column of text: … of 'text';
3 | new my.yaml --text=a.csv | a.csv
  text\n"a | a.csv cannot be read: Error: unexpected end of data$
  text\na\na, b | a.csv cannot be read: Error: row 2 has more cells than the fi
  userId,film\n1,So What\n2,So\n | name … of 'userId', 'film'; those of a table of events
  u,film\na,So What\na,So Be It\n | name … of 'u', 'film'; those of a table of events
  u,i,t\n1,2,3\n | a.csv: name the column of the text: --text-field=NAME, of 'u', 'i', 't'; those \
of a table of events: --items USER ITEM TIME, of 'u', 'i', 't'$
  u0,i0,17\nu1,i1,18\n | a.csv: the first row looks like data, not names: name
3 | new my.yaml --text=a.csv --text-field=body | a.csv
  id,title,text\n0,t0,the cat sat\n | 'body' is no column of text: … , of 'id', 'title', 'text'
2 | new my.yaml --text=a.csv --items u i t | a.csv
  u,i,t\nu0,1,1\nu0,2,2\nu1,1,1\n | no user has three events
4 | evaluate copy --text=words.txt | copy/tokenizer.json
  "lowercase": false=>"lowercase": true | copy: the tokenizer is not the one that the\
 model was trained with$
4 | evaluate copy | copy/model.safetensors
   | copy/model.safetensors is damaged
4 | evaluate copy | copy/model.json
   | copy/model.json is damaged
3 | report copy | copy/env.json
  {"a | copy/env.json is damaged: Invalid JSON
3 | report copy | copy/metrics.csv
  step\n1\n | copy/metrics.csv, line 1, is damaged
3 | report copy | copy/evaluate-x.json
   | copy/evaluate-x.json is damaged: Invalid JSON
3 | export copy export | copy/evaluate-x.json
  [1] | copy/evaluate-x.json is damaged: Input should be
2 | info copy | copy/config.yaml
  \nrun_dir: =>\nrun_dir: [x]\nunknown:  | copy/config.yaml: run_dir: Input should be a valid string
2 | new my.yaml --text=words.txt | runs/my/config.yaml
  a | runs/my/config.yaml already exists: choose another name$
2 | new my.yaml --text=lines.txt | runs/my/text/x
  a | runs/my/text already exists
"""
"""The exit code, a command and a file, then the contents or edits that give it each message."""
