use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::fs;

fn note(text: &str) -> Event {
    let mut event = Event::new("note", "");
    event.rest.insert("note".into(), text.into());
    event
}

fn texts(journal: &Journal) -> Vec<&str> {
    journal.events.iter().map(|e| e.text("note").unwrap()).collect()
}

/// Makes a bundle with two events; returns its folder and the bytes of its journal.
fn two() -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    append(dir.path(), note("one")).unwrap();
    append(dir.path(), note("zwei ä")).unwrap();
    let bytes = fs::read(dir.path().join(JOURNAL_FILE)).unwrap();
    (dir, bytes)
}

fn refused(bytes: &[u8], says: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(JOURNAL_FILE);
    fs::write(&path, bytes).unwrap();
    let error = read(dir.path()).unwrap_err().to_string();
    assert!(error.contains(JOURNAL_FILE) && error.contains(says), "{error}");
}

#[test]
fn a_bundle_without_a_journal_has_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(read(dir.path()).unwrap(), Journal::default());
    fs::write(dir.path().join(JOURNAL_FILE), "").unwrap();
    assert_eq!(read(dir.path()).unwrap(), Journal::default());
}

#[test]
fn small_values_that_take_much_memory_are_refused() {
    let line = |i: usize| {
        let values = r#"{"":0},"#.repeat(20_000);
        format!("{{\"id\":\"e{i}\",\"time\":\"2026-01-01T00:00:00Z\",\"kind\":\"note\",\"x\":[{values}0]}}\n")
    };
    let journal = |lines: usize| (0..lines).map(line).collect::<String>();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(JOURNAL_FILE), journal(3)).unwrap();
    assert_eq!(read(dir.path()).unwrap().events.len(), 3);
    refused(journal(20).as_bytes(), "too many values");
}

#[test]
fn events_come_back_in_order_with_ids_of_their_own() {
    let (dir, _) = two();
    let journal = read(dir.path()).unwrap();
    assert_eq!(texts(&journal), ["one", "zwei ä"]);
    assert_ne!(journal.events[0].id, journal.events[1].id);
    assert_eq!(journal.events[0].id.len(), 10);
    // The same event twice has two ids.
    let event = note("same");
    let ids = [0; 2].map(|_| append(dir.path(), event.clone()).unwrap().id);
    assert_ne!(ids[0], ids[1]);
}

/// Checks that the lines before a cut are read, wherever a kill cuts off the last line, and that the next append
/// removes the cut line.
#[test]
fn a_torn_last_line_is_tolerated_and_mended() {
    let (dir, bytes) = two();
    let path = dir.path().join(JOURNAL_FILE);
    let first = bytes.iter().position(|&b| b == b'\n').unwrap() + 1;
    for cut in first + 1..bytes.len() - 1 {
        fs::write(&path, &bytes[..cut]).unwrap();
        let journal = read(dir.path()).unwrap();
        assert!(journal.torn, "cut at {cut}");
        assert_eq!(texts(&journal), ["one"]);
    }
    append(dir.path(), note("two")).unwrap();
    let journal = read(dir.path()).unwrap();
    assert!(!journal.torn);
    assert_eq!(texts(&journal), ["one", "two"]);
    // A whole last line without its newline, as an editor may leave it, is kept.
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(texts(&read(dir.path()).unwrap()).len(), 2);
    append(dir.path(), note("three")).unwrap();
    assert_eq!(texts(&read(dir.path()).unwrap()), ["one", "zwei ä", "three"]);
    // Zeros that a file system leaves where data never arrived.
    for tail in [&b"\0\0\0\0"[..], b"{\"id\":\"a\0\0\0"] {
        fs::write(&path, [&bytes[..first], tail].concat()).unwrap();
        assert!(read(dir.path()).unwrap().torn);
        append(dir.path(), note("two")).unwrap();
        assert_eq!(texts(&read(dir.path()).unwrap()), ["one", "two"]);
    }
}

#[test]
fn an_append_behind_a_whole_event_and_zeros_is_read_back() {
    let (dir, mut bytes) = two();
    bytes.pop();
    bytes.extend([0; 40]);
    fs::write(dir.path().join(JOURNAL_FILE), bytes).unwrap();
    append(dir.path(), note("third")).unwrap();
    assert_eq!(read(dir.path()).unwrap().events.len(), 3);
}

#[test]
fn garbage_is_named_by_its_line() {
    let (_dir, bytes) = two();
    let with = |tail: &str| [&bytes[..], tail.as_bytes()].concat();
    refused(&with("garbage\n"), "line 3: expected value, at character 1");
    refused(&with("garbage"), "line 3");
    refused(&with("{\"id\":\n{}\n"), "line 3: EOF");
    refused(&with("{}\n"), "line 3: key `id` is missing");
    refused(&with("[1]"), "line 3");
    refused(b"\xff\xfe\x00", "line 1");
    refused(&with("{\"id\":\"a\",\"time\":\"yesterday\",\"kind\":\"note\"}\n"), "line 3");
    let time = "2026-01-02T03:04:05Z";
    refused(&with(&format!("{{\"id\":\"a b\",\"time\":\"{time}\",\"kind\":\"x\"}}\n")), "`id`");
    refused(&with(&format!("{{\"id\":\"a\",\"time\":\"{time}\",\"kind\":\"\\u001b[2J\"}}\n")), "`kind`");
    refused("[".repeat(100_000).as_bytes(), "line 1");
    // An append behind garbage is refused, and leaves the file as it was.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(JOURNAL_FILE);
    fs::write(&path, with("garbage")).unwrap();
    assert!(append(dir.path(), note("x")).unwrap_err().to_string().contains("line 3"));
    assert_eq!(fs::read(&path).unwrap(), with("garbage"));
}

#[test]
fn lines_and_files_have_a_limit() {
    let (dir, bytes) = two();
    let error = append(dir.path(), note(&"x".repeat(MAX_LINE_BYTES))).unwrap_err();
    assert!(error.to_string().contains("more than 262144"), "{error}");
    assert_eq!(fs::read(dir.path().join(JOURNAL_FILE)).unwrap(), bytes);
    let mut long = bytes.clone();
    long.extend(vec![b' '; MAX_LINE_BYTES + 1]);
    refused(&long, "line 3");
    let file = File::create(dir.path().join(JOURNAL_FILE)).unwrap();
    file.set_len(MAX_JOURNAL_BYTES + 1).unwrap();
    assert!(read(dir.path()).unwrap_err().to_string().contains("more than the 16777216"));
    assert!(append(dir.path(), note("x")).unwrap_err().to_string().contains("more than 16777216"));
    // A file of the maximal length is read, and takes no event.
    let line = [&bytes[..], &vec![b'\n'; MAX_JOURNAL_BYTES as usize - bytes.len()]].concat();
    fs::write(dir.path().join(JOURNAL_FILE), line).unwrap();
    assert_eq!(read(dir.path()).unwrap().events.len(), 2);
    assert!(append(dir.path(), note("x")).is_err());
    assert_eq!(fs::metadata(dir.path().join(JOURNAL_FILE)).unwrap().len(), MAX_JOURNAL_BYTES);
}

#[test]
fn a_journal_is_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(JOURNAL_FILE)).unwrap();
    for error in [read(dir.path()).unwrap_err(), append(dir.path(), note("x")).unwrap_err()] {
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
    #[cfg(unix)]
    {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "precious\n").unwrap();
        std::os::unix::fs::symlink(&other, dir.path().join(JOURNAL_FILE)).unwrap();
        assert!(append(dir.path(), note("x")).is_err());
        assert_eq!(fs::read(&other).unwrap(), b"precious\n");
    }
    assert!(append(&dir.path().join("no"), note("x")).unwrap_err().to_string().contains("no"));
}

#[test]
fn journals_are_joined_in_the_order_of_their_times() {
    let (a, _) = two();
    let (b, mut other) = two();
    let between = append(a.path(), note("three")).unwrap();
    merge(a.path(), &other).unwrap();
    let joined = read(a.path()).unwrap();
    assert_eq!(joined.events.len(), 5);
    assert!(joined.events.is_sorted_by_key(|e| e.time) && joined.events.contains(&between));
    // A second merge adds nothing, and the cut-off last line of the other journal is dropped.
    other.extend(b"{\"id\": \"x");
    merge(a.path(), &other).unwrap();
    assert_eq!(read(a.path()).unwrap(), joined);
    assert!(merge(a.path(), b"no journal\n").is_err());
    assert_eq!(read(a.path()).unwrap(), joined);
    // A merge into a bundle without a journal.
    fs::remove_file(b.path().join(JOURNAL_FILE)).unwrap();
    merge(b.path(), &other).unwrap();
    assert_eq!(texts(&read(b.path()).unwrap()), ["one", "zwei ä"]);
}

#[test]
fn appenders_do_not_mix_their_lines() {
    let dir = tempfile::tempdir().unwrap();
    let (threads, each) = (8, 12);
    std::thread::scope(|scope| {
        for t in 0..threads {
            let dir = dir.path();
            scope.spawn(move || {
                for i in 0..each {
                    append(dir, note(&format!("{t} {i} {}", "x".repeat(t * 3000)))).unwrap();
                }
            });
        }
    });
    let journal = read(dir.path()).unwrap();
    assert!(!journal.torn);
    assert_eq!(journal.events.len(), threads * each);
    let ids: std::collections::BTreeSet<&str> = journal.events.iter().map(|e| e.id.as_str()).collect();
    assert_eq!(ids.len(), threads * each);
    // The events of one thread are in the thread's order.
    for t in 0..threads {
        let own: Vec<String> = texts(&journal)
            .iter()
            .filter(|x| x.starts_with(&format!("{t} ")))
            .map(|x| x.split(' ').nth(1).unwrap().to_string())
            .collect();
        assert_eq!(own, (0..each).map(|i| i.to_string()).collect::<Vec<_>>());
    }
}

#[test]
fn what_newer_versions_write_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let line = json!({
        "id": "x1", "time": "2030-01-02T03:04:05+02:00", "kind": "dream", "status": "half", "watts": [3, 4.5],
        "machine": {"cpu": "M9", "ane_cores": 64}, "facts": {"deep": {"er": null}}
    });
    fs::write(dir.path().join(JOURNAL_FILE), format!("{line}\n")).unwrap();
    let event = read(dir.path()).unwrap().events.remove(0);
    assert_eq!((event.kind.as_str(), event.status.as_str()), ("dream", "half"));
    assert_eq!(event.rest["watts"], json!([3, 4.5]));
    assert_eq!(event.machine.as_ref().unwrap().rest["ane_cores"], 64);
    assert_eq!(event.time.to_string(), "2030-01-02T01:04:05Z");
    let again = append(dir.path(), event.clone()).unwrap();
    assert_eq!(again, event);
    assert_eq!(read(dir.path()).unwrap().events[1], event);
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |x| x.is_finite()).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            map_of(inner).prop_map(Value::Object),
        ]
    })
}

fn map_of(of: impl Strategy<Value = Value>) -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::btree_map(any::<String>(), of, 0..4).prop_map(|m| m.into_iter().collect())
}

fn event() -> impl Strategy<Value = Event> {
    let words = ("[a-zA-Z0-9_.-]{1,64}", "[a-z]{1,12}", "[a-z]{0,12}", prop::option::of("[0-9a-f]{10}"));
    let cpu = prop::option::of(any::<String>());
    let seconds = prop::option::of(any::<f64>().prop_filter("finite", |x| x.is_finite()));
    // Texts, and names that no field of an event has.
    let rest = prop::collection::btree_map("(intent|note|lesson|x_[a-z]{0,5})", value(), 0..3);
    let maps = (map_of(value()), map_of(value()), rest);
    (words, -62_135_596_800i64..253_402_207_199, seconds, any::<String>(), cpu, maps).prop_map(
        |((id, kind, status, of), time, seconds, version, cpu, (options, facts, rest))| Event {
            id,
            time: Timestamp::from_second(time).unwrap(),
            kind,
            status,
            seconds,
            of,
            version,
            machine: Some(Machine { cpu, ..Machine::default() }),
            options,
            facts,
            rest: rest.into_iter().collect(),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    /// Checks that an event is one line whatever it holds, is read as it was written, and that every cut of the line
    /// is seen as torn.
    #[test]
    fn events_come_back_as_they_were(event in event()) {
        let line = serde_json::to_vec(&event).unwrap();
        prop_assert!(!line.contains(&b'\n'));
        prop_assert_eq!(&parse_line(&line, &mut u64::MAX.clone()).map_err(|f| f.what).unwrap(), &event);
        for cut in 1..line.len() {
            prop_assert!(parse_line(&line[..cut], &mut u64::MAX.clone()).is_err_and(|f| f.torn), "cut at {}", cut);
        }
    }

    /// Checks that the reader panics on no bytes.
    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(Path::new("j"), &bytes);
    }
}
