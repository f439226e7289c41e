//! `anemoe chat` in a pipe and at a terminal, on the small model: answers, commands, sessions, full contexts, and refusals.

use crate::common::{anemoe, build, finish, refused};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

/// Returns a bundle of the small model with a short context, built once.
fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUNDLE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small.anemoe");
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
        build(&small, &path, &["--max-context", "256", "--no-journal"]);
        (dir, path)
    });
    path
}

/// Runs a chat with this text as its input; returns exit status, output and messages.
fn chat(options: &[&str], text: &str) -> (i32, String, String) {
    let mut args = vec!["chat", bundle().to_str().unwrap()];
    args.extend(options);
    let mut command = anemoe(&args);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A chat that is refused does not read its input.
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    finish(child.wait_with_output().unwrap())
}

/// Runs a chat that has to end well, and returns its document.
fn turns(options: &[&str], text: &str) -> Value {
    let mut all = options.to_vec();
    all.push("--json");
    let (code, out, err) = chat(&all, text);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_second_turn_goes_on_from_the_first() {
    let v = turns(&["-n", "12", "--system", "Write Python."], "def main():\nimport \\\nos\n");
    let turns = v["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 2, "{v}");
    let number = |turn: usize, key: &str| turns[turn][key].as_u64().unwrap();
    assert_eq!(number(0, "reused_tokens"), 0);
    // All tokens of the first turn but the last one, which no pass has seen.
    let first = number(0, "prompt_tokens") + turns[0]["generated_ids"].as_array().unwrap().len() as u64;
    assert!(number(1, "reused_tokens") >= first - 1, "{v}");
    let roles: Vec<&str> =
        v["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(v["messages"][3]["content"], "import \nos");
    let (code, out, err) = chat(&["-n", "12", "--system", "Write Python."], "def main():\n/stats\n");
    assert_eq!(code, 0);
    assert_eq!(out.trim_end(), turns[0]["text"].as_str().unwrap().trim_end());
    assert!(err.contains("tok/s") && err.contains("1 answer"), "{err}");
}

#[test]
fn a_session_goes_on_as_if_it_had_not_ended() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.session");
    let session = ["-n", "10", "--session", file.to_str().unwrap()];
    let whole = turns(&["-n", "10"], "class A:\nimport re\n");
    let first = turns(&session, "class A:\n");
    let second = turns(&session, "import re\n");
    assert_eq!(first["turns"][0]["generated_ids"], whole["turns"][0]["generated_ids"]);
    assert_eq!(second["turns"][0]["generated_ids"], whole["turns"][1]["generated_ids"]);
    assert_eq!(second["turns"][0]["reused_tokens"], whole["turns"][1]["reused_tokens"]);
    // Files that are damaged in any place, cut off, or of another kind.
    let bytes = fs::read(&file).unwrap();
    for at in [0, 20, 30, bytes.len() / 2, bytes.len() - 70, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(&file, &damaged).unwrap();
        let (code, _, err) = chat(&session, "x\n");
        assert!(code == 2 && err.contains("talk.session") && !err.contains("panicked"), "{at}: {err}");
    }
    for length in [0, 10, 18, 26, 100, bytes.len() - 1] {
        fs::write(&file, &bytes[..length]).unwrap();
        let (code, _, err) = chat(&session, "x\n");
        assert!(code == 2 && err.contains("talk.session"), "{length}: {err}");
    }
}

#[test]
fn answers_before_a_wrong_command_are_not_lost() {
    let (code, out, err) = chat(&["-n", "6", "--json"], "a = 1\n/load none\nb = 2\n");
    let v: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, v["turns"].as_array().unwrap().len()), (2, 1), "{v}");
    let said = v["error"]["message"].as_str().unwrap();
    assert!(said.contains("none") && err.trim_end().ends_with(&format!("error: {said}")), "{err}");
    assert_eq!(said.matches("o such file").count(), 1, "{said}");
}

#[test]
fn commands_save_load_and_reset() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let name = file.to_str().unwrap();
    let text =
        format!("a = 1\n/save {name}\n/reset\na = 1\n/load {name}\n/help\n//not a command\n/quit\nnever\n");
    let v = turns(&["-n", "6"], &text);
    let turns = v["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 3, "{v}");
    assert_eq!(turns[0]["generated_ids"], turns[1]["generated_ids"]);
    assert_eq!(turns[1]["reused_tokens"], 0);
    assert!(turns[2]["reused_tokens"].as_u64().unwrap() > 5);
    assert_eq!(v["messages"][2]["content"], "/not a command");
    for (text, says) in
        [("/nothing\n", "no command /nothing"), ("/save\n", "/save needs"), ("/load none\n", "none")]
    {
        let (code, _, err) = chat(&[], text);
        assert!(code == 2 && err.contains(says), "{text}: {err}");
    }
}

#[test]
fn a_full_context_slides_or_stops() {
    let question = "import os, sys, re, json, time\n".repeat(12);
    let v = turns(&["-n", "30", "--system", "S"], &question);
    assert_eq!(v["turns"].as_array().unwrap().len(), 12);
    assert_eq!(v["messages"][0]["role"], "system");
    assert!(v["messages"].as_array().unwrap().len() < 20, "{v}");
    let (code, _, err) = chat(&["-n", "30", "--overflow", "stop"], &question);
    assert!(code == 2 && err.contains("the context is full"), "{err}");
    let (code, _, err) = chat(&["-n", "30"], &format!("{}\n", "word ".repeat(400)));
    assert!(code == 2 && err.contains("too long for the context"), "{err}");
}

#[test]
fn a_stop_string_ends_an_answer_and_is_not_shown() {
    let free = turns(&["-n", "20"], "def f(x):\n");
    let text = free["turns"][0]["text"].as_str().unwrap();
    let middle = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[middle..].chars().take(3).collect();
    let v = turns(&["-n", "20", "--stop", &stop], "def f(x):\nnext\n");
    assert_eq!(v["turns"][0]["text"], text[..text.find(&stop).unwrap()]);
    assert_eq!(v["turns"][0]["stop"], "stop_string");
}

#[test]
fn templates_come_from_the_bundle_or_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.jinja");
    fs::write(&file, "{{ raise_exception('not today') }}").unwrap();
    let (code, _, err) = chat(&["--chat-template", file.to_str().unwrap()], "x\n");
    assert!(code == 2 && err.contains("not today") && err.contains("t.jinja"), "{err}");
    fs::write(&file, "{% for").unwrap();
    let (code, _, err) = chat(&["--chat-template", file.to_str().unwrap()], "x\n");
    assert!(code == 2 && err.contains("chat template"), "{err}");
    // Templates that take memory, or a stack, without end.
    let doubling = "{% set ns = namespace(s='x' * 1000) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}";
    for (template, says) in [
        (doubling.to_string(), "more than 256 MB of memory"),
        (format!("{{{{ x{} }}}}", "|trim".repeat(40_000)), ""),
        (format!("{{{{ {}1 }}}}", "1 + ".repeat(60_000)), ""),
        (format!("{{{{ x{} }}}}", ".a".repeat(120_000)), ""),
        (" ".repeat(300_000), "300000 bytes"),
    ] {
        fs::write(&file, template).unwrap();
        let (code, _, err) = chat(&["--chat-template", file.to_str().unwrap(), "-n", "2"], "x\n");
        assert!(
            (code == 2 || says.is_empty() && code == 0) && err.contains(says),
            "{code}: {}",
            &err[..err.len().min(300)]
        );
    }
    let b = bundle().to_str().unwrap();
    refused(&["chat", b, "--temperature", "-1"], &["temperature"]);
    refused(&["chat", b, "--top-p", "nan"], &["top-p"]);
    refused(&["chat", b, "--session", dir.path().to_str().unwrap()], &["session: it is a folder"]);
    refused(&["chat", dir.path().join("none").to_str().unwrap()], &["no such file or folder"]);
    // A build copies the checkpoint's template.
    let checkpoint = dir.path().join("checkpoint");
    crate::common::copy(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4"),
        &checkpoint,
    );
    fs::write(checkpoint.join("chat_template.jinja"), "{{ raise_exception('from the checkpoint') }}")
        .unwrap();
    let built = dir.path().join("built.anemoe");
    build(&checkpoint, &built, &["--max-context", "64", "--no-journal"]);
    fs::write(dir.path().join("q"), "x").unwrap();
    let question = fs::File::open(dir.path().join("q")).unwrap();
    let output = anemoe(&["chat", built.to_str().unwrap()]).stdin(question).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("from the checkpoint"));
    // A bundle without a template of its own.
    let plain = dir.path().join("plain.anemoe");
    crate::common::copy(bundle(), &plain);
    fs::write(plain.join("tokenizer_config.json"), r#"{"bos_token": "<bos>"}"#).unwrap();
    let (code, _, err) = crate::common::run(&["chat", plain.to_str().unwrap(), "--no-verify", "-n", "4"]);
    assert!(code == 0 && err.contains("no chat template"), "{err}");
}

#[test]
fn a_session_is_kept_when_an_error_ends_the_chat() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.session");
    let session = ["-n", "6", "--session", file.to_str().unwrap()];
    let (code, _, err) = chat(&session, "class A:\n/bogus\n");
    assert!(code == 2 && err.contains("/bogus"), "{err}");
    let v = turns(&session, "import re\n");
    assert_eq!(v["messages"].as_array().unwrap().len(), 4, "{v}");
    // A place that cannot be written to shows before there is a session to lose.
    let none = dir.path().join("none").join("s");
    let (code, _, err) = chat(&["--session", none.to_str().unwrap()], "x\n");
    assert!(code == 2 && err.contains("none") && !err.contains("[prompt"), "{err}");
    // A file that is no session is not replaced.
    let other = dir.path().join("thesis.txt");
    fs::write(&other, "years of work").unwrap();
    let (code, _, err) = chat(&["-n", "4"], &format!("x\n/save {}\n", other.display()));
    assert!(code == 2 && err.contains("another file") && err.contains("thesis.txt"), "{err}");
    assert_eq!(fs::read(&other).unwrap(), b"years of work");
    let (code, _, err) = chat(&["-n", "4"], &format!("x\n/save {}\n", file.display()));
    assert_eq!(code, 0, "{err}");
}

#[cfg(unix)]
#[test]
fn a_signal_ends_a_piped_chat_and_the_session_is_kept() {
    use std::io::{BufRead, BufReader};
    let dir = tempfile::tempdir().unwrap();
    for (signal, status) in [("INT", 130), ("TERM", 143)] {
        let file = dir.path().join(signal);
        let args =
            ["chat", bundle().to_str().unwrap(), "-n", "200", "--session", file.to_str().unwrap(), "--json"];
        let mut child =
            anemoe(&args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all("class A:\n".repeat(50).as_bytes()).unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(|line| line.unwrap());
        assert!(lines.any(|line| line.contains("[prompt")), "no answer");
        let kill =
            std::process::Command::new("kill").args(["-s", signal]).arg(child.id().to_string()).status();
        assert!(kill.unwrap().success());
        let messages: Vec<String> = lines.collect();
        assert_eq!(child.wait().unwrap().code(), Some(status), "{messages:?}");
        let v = turns(&["-n", "2", "--session", file.to_str().unwrap()], "x\n");
        assert!(v["messages"].as_array().unwrap().len() >= 4, "{v}");
    }
}

/// A chat whose standard input and messages are at a terminal.
#[cfg(target_os = "linux")]
struct AtTerminal {
    child: std::process::Child,
    keys: fs::File,
    shown: std::sync::Arc<std::sync::Mutex<String>>,
}

#[cfg(target_os = "linux")]
impl AtTerminal {
    /// Starts the chat; standard output goes to the terminal if no file is given.
    fn start(options: &[&str], output: Option<fs::File>) -> AtTerminal {
        use std::io::Read;
        let terminal = nix::pty::openpty(None, None).unwrap();
        let own = || Stdio::from(terminal.slave.try_clone().unwrap());
        let mut command = std::process::Command::new("setsid");
        command.args(["--ctty", "--wait", env!("CARGO_BIN_EXE_anemoe"), "chat", bundle().to_str().unwrap()]);
        command.args(options).env("TERM", "xterm").stdin(own()).stderr(own());
        command.stdout(output.map_or_else(own, Stdio::from));
        let child = command.spawn().unwrap();
        let shown = std::sync::Arc::<std::sync::Mutex<String>>::default();
        let keys = fs::File::from(terminal.master);
        let (mut screen, all) = (keys.try_clone().unwrap(), shown.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The terminal ends with an error once nobody has it open.
            while let Ok(n @ 1..) = screen.read(&mut bytes) {
                *all.lock().unwrap() += &String::from_utf8_lossy(&bytes[..n]);
            }
        });
        AtTerminal { child, keys, shown }
    }

    /// Waits until a text has been shown `times` times.
    fn wait_for(&self, text: &str, times: usize) {
        let started = std::time::Instant::now();
        while self.shown.lock().unwrap().matches(text).count() < times {
            assert!(started.elapsed().as_secs() < 60, "{text} does not come: {}", self.shown.lock().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Waits until the next question is asked for behind so many answers: keys before that are typed ahead.
    fn wait_for_question_behind(&self, answers: usize) {
        let started = std::time::Instant::now();
        let is_asked = || {
            let shown = self.shown.lock().unwrap();
            shown.match_indices("[prompt").nth(answers - 1).is_some_and(|(at, _)| shown[at..].contains("> "))
        };
        while !is_asked() {
            assert!(started.elapsed().as_secs() < 60, "no question: {}", self.shown.lock().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Waits until an answer to a question has begun.
    fn wait_for_words_behind(&self, question: &str) {
        let started = std::time::Instant::now();
        let words = || {
            let shown = self.shown.lock().unwrap();
            shown.rsplit_once(question).map_or(0, |(_, behind)| behind.matches(char::is_alphabetic).count())
        };
        // The editor's own output has fewer letters.
        while words() < 10 {
            assert!(started.elapsed().as_secs() < 60, "no answer: {}", self.shown.lock().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Waits for the end of the chat and returns its exit status.
    fn status(&mut self) -> i32 {
        let started = std::time::Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(started.elapsed().as_secs() < 60, "it does not end: {}", self.shown.lock().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Tells whether the terminal gathers lines and shows typed text, as a shell expects.
    fn is_sane(&self) -> bool {
        use nix::sys::termios::{LocalFlags, tcgetattr};
        let flags = tcgetattr(&self.keys).unwrap().local_flags;
        flags.contains(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG)
    }
}

#[cfg(target_os = "linux")]
impl Drop for AtTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_typed_while_an_answer_comes_waits_for_its_end() {
    let answering = |options: &[&str]| {
        let chat = AtTerminal::start(options, None);
        chat.wait_for("> ", 1);
        chat
    };
    // Ctrl-D during an answer ends the chat after the answer.
    let mut chat = answering(&["-n", "150"]);
    chat.press("def main():\r");
    chat.wait_for_words_behind("def main():");
    chat.press("\u{4}");
    assert_eq!(chat.status(), 0);
    let shown = chat.shown.lock().unwrap().clone();
    assert_eq!(shown.matches("[prompt").count(), 1, "{shown}");
    assert!(chat.is_sane());
    // Lines and then Ctrl-D during an answer: all lines are answered first.
    let mut chat = answering(&["-n", "150"]);
    chat.press("def main():\r");
    chat.wait_for_words_behind("def main():");
    chat.press("first line\rsecond line\r\u{4}");
    assert_eq!(chat.status(), 0);
    let shown = chat.shown.lock().unwrap().clone();
    assert_eq!(shown.matches("[prompt").count(), 3, "{shown}");
    assert!(shown.contains("> first line") && shown.contains("> second line"), "{shown}");
    // Half a line becomes the beginning of the next question.
    let mut chat = answering(&["-n", "150"]);
    chat.press("def main():\r");
    chat.wait_for_words_behind("def main():");
    chat.press("/st");
    chat.wait_for("[prompt", 1);
    chat.press("ats\r");
    chat.wait_for("1 answer", 1);
    chat.press("\u{4}");
    assert_eq!(chat.status(), 0);
    assert!(chat.is_sane());
}

#[cfg(target_os = "linux")]
#[test]
fn a_terminal_takes_lines_in_one_piece_and_keeps_output_apart() {
    let mut chat = AtTerminal::start(&["-n", "4"], None);
    chat.wait_for("> ", 1);
    chat.press("def main():\r");
    chat.wait_for("[prompt", 1);
    // A line that is typed ahead, before the next question is asked for.
    chat.press("import os\r");
    chat.wait_for_question_behind(2);
    // The arrow key brings the line above again.
    chat.press("\u{1b}[A\r");
    chat.wait_for("[prompt", 3);
    chat.press("/quit\r");
    assert_eq!(chat.status(), 0);
    let shown = chat.shown.lock().unwrap().clone();
    assert!(shown.matches("import os").count() >= 2, "{shown}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.json");
    let mut chat = AtTerminal::start(&["-n", "4", "--json"], Some(fs::File::create(&file).unwrap()));
    chat.wait_for("> ", 1);
    chat.press("def main():\r");
    chat.wait_for("[prompt", 1);
    chat.press("/quit\r");
    assert_eq!(chat.status(), 0);
    let v: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(v["messages"][0]["content"], "def main():");
}
