//! `anemoe chat` in a pipe and at a terminal, on the small model: answers, commands, sessions, full contexts, and refusals.

use crate::common::*;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::process::Stdio;

/// Returns a bundle of the small model with a short context.
fn bundle() -> Place {
    built("small", "--max-context 256 --no-journal")
}

/// Runs a chat with this text as its input; returns exit status, output and messages.
fn chat(bundle: &Place, options: &str, text: &str) -> (i32, String, String) {
    fed(&mut anemoe(format!("chat {bundle} {options}")), text)
}

/// Checks that a chat ends with these words.
fn chat_refused(bundle: &Place, options: &str, text: &str, says: &[&str]) {
    let (code, _, err) = chat(bundle, options, text);
    assert!(code == 2 && says.iter().all(|word| err.contains(word)), "{says:?}: {code} {err:.300}");
}

/// Runs a chat that has to end well, and returns its document.
fn talk(bundle: &Place, options: &str, text: &str) -> Value {
    let (code, out, err) = chat(bundle, &format!("{options} --json"), text);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_second_turn_goes_on_from_the_first() {
    let bundle = bundle();
    let v = talk(&bundle, "-n 12 --system 'Write Python.'", "def main():\nimport \\\nos\n");
    let [first, second] = list(&v["turns"]).as_slice() else { panic!("{v}") };
    assert_eq!(first["reused_tokens"], 0);
    // All tokens of the first turn but the last one, which no pass has seen.
    let seen = count(&first["prompt_tokens"]) as usize + ids(&first["generated_ids"]).len() - 1;
    assert!(count(&second["reused_tokens"]) as usize >= seen, "{v}");
    let roles: Vec<&str> = each(&v["messages"], "role").collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(v["messages"][3]["content"], "import \nos");
    let (code, out, err) = chat(&bundle, "-n 12 --system 'Write Python.'", "def main():\n/stats\n");
    assert_eq!((code, out.trim_end()), (0, text(&first["text"]).trim_end()));
    assert!(err.contains("tok/s") && err.contains("1 answer"), "{err}");
}

#[test]
fn a_session_goes_on_as_if_it_had_not_ended() {
    let (bundle, file) = (bundle(), folder().join("talk.session"));
    let session = format!("-n 10 --session {file}");
    let whole = talk(&bundle, "-n 10", "class A:\nimport re\n");
    let first = talk(&bundle, &session, "class A:\n");
    let second = talk(&bundle, &session, "import re\n");
    assert_eq!(first["turns"][0]["generated_ids"], whole["turns"][0]["generated_ids"]);
    for key in ["generated_ids", "reused_tokens"] {
        assert_eq!(second["turns"][0][key], whole["turns"][1][key]);
    }
    // Files that are damaged in any place, cut off, or of another kind.
    let bytes = fs::read(&file).unwrap();
    for at in [0, 20, bytes.len() / 2, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        for damaged in [&damaged, &bytes[..at]] {
            fs::write(&file, damaged).unwrap();
            chat_refused(&bundle, &session, "x\n", &["talk.session"]);
        }
    }
}

#[test]
fn a_session_is_kept_when_an_error_ends_the_chat() {
    let (bundle, dir) = (bundle(), folder());
    let session = format!("-n 6 --session {}", dir.join("talk.session"));
    chat_refused(&bundle, &session, "class A:\n/bogus\n", &["/bogus"]);
    let v = talk(&bundle, &session, "import re\n");
    assert_eq!(list(&v["messages"]).len(), 4, "{v}");
    // A place that cannot be written to shows before there is a session to lose.
    let (code, _, err) = chat(&bundle, &format!("--session {}", dir.join("none/s")), "x\n");
    assert!(code == 2 && err.contains("none") && !err.contains("[prompt"), "{err}");
    // A file that is no session is not replaced.
    let other = dir.join("thesis.txt");
    fs::write(&other, "years of work").unwrap();
    chat_refused(&bundle, "-n 4", &format!("x\n/save {other}\n"), &["another file", "thesis.txt"]);
    assert_eq!(fs::read(&other).unwrap(), b"years of work");
    talk(&bundle, "-n 4", &format!("x\n/save {}\n", dir.join("talk.session")));
}

#[test]
fn commands_save_load_and_reset() {
    let (bundle, file) = (bundle(), folder().join("s"));
    let commands =
        format!("a = 1\n/save {file}\n/reset\na = 1\n/load {file}\n/help\n//not a command\n/quit\nnever\n");
    let v = talk(&bundle, "-n 6", &commands);
    let [first, again, loaded] = list(&v["turns"]).as_slice() else { panic!("{v}") };
    assert_eq!((&first["generated_ids"], &again["reused_tokens"]), (&again["generated_ids"], &0.into()));
    assert!(count(&loaded["reused_tokens"]) > 5);
    assert_eq!(v["messages"][2]["content"], "/not a command");
    for (text, says) in
        [("/nothing\n", "no command /nothing"), ("/save\n", "/save needs"), ("/load none\n", "none")]
    {
        chat_refused(&bundle, "", text, &[says]);
    }
    // Answers before a wrong command are not lost.
    let (code, out, err) = chat(&bundle, "-n 6 --json", "a = 1\n/load none\nb = 2\n");
    let v: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, list(&v["turns"]).len()), (2, 1), "{v}");
    let said = text(&v["error"]["message"]);
    assert!(said.contains("none") && err.trim_end().ends_with(&format!("error: {said}")), "{err}");
    assert_eq!(said.matches("o such file").count(), 1, "{said}");
}

#[test]
fn a_full_context_slides_or_stops() {
    let bundle = bundle();
    let question = "import os, sys, re, json, time\n".repeat(12);
    let v = talk(&bundle, "-n 30 --system S", &question);
    assert_eq!((list(&v["turns"]).len(), &v["messages"][0]["role"]), (12, &"system".into()));
    assert!(list(&v["messages"]).len() < 20, "{v}");
    chat_refused(&bundle, "-n 30 --overflow stop", &question, &["the context is full"]);
    chat_refused(&bundle, "-n 30", &format!("{}\n", "word ".repeat(400)), &["too long for the context"]);
}

#[test]
fn templates_come_from_the_bundle_or_a_file() {
    let (bundle, dir) = (bundle(), folder());
    let file = dir.join("t.jinja");
    // The last ones take memory, or a stack, without end; where there are no words, a chat may end well.
    let doubling = "{% set ns = namespace(s='x' * 1000) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}";
    for (template, says) in [
        ("{{ raise_exception('not today') }}".to_string(), &["not today", "t.jinja"][..]),
        ("{% for".into(), &["chat template"]),
        (doubling.into(), &["more than 256 MB of memory"]),
        (format!("{{{{ x{} }}}}", "|trim".repeat(40_000)), &[]),
    ] {
        fs::write(&file, template).unwrap();
        let (code, _, err) = chat(&bundle, &format!("--chat-template {file} -n 2"), "x\n");
        assert!(code == 2 || says.is_empty() && code == 0, "{code}: {err:.300}");
        assert!(says.iter().all(|word| err.contains(word)), "{err:.300}");
    }
    refused(format!("chat {bundle} --session {dir}"), &["session: it is a folder"]);
    // A build copies the checkpoint's template.
    let checkpoint = dir.join("checkpoint");
    copy(&small(), &checkpoint);
    fs::write(checkpoint.join("chat_template.jinja"), "{{ raise_exception('from the checkpoint') }}")
        .unwrap();
    let own = dir.join("built.anemoe");
    build(&checkpoint, &own, "--max-context 64 --no-journal");
    chat_refused(&own, "", "x", &["from the checkpoint"]);
    // A bundle without a template of its own.
    fs::write(bundle.join("tokenizer_config.json"), r#"{"bos_token": "<bos>"}"#).unwrap();
    ends(0, format!("chat {bundle} --no-verify -n 4"), &["no chat template"]);
}

#[cfg(unix)]
#[test]
fn a_signal_ends_a_piped_chat_and_the_session_is_kept() {
    use std::io::{BufRead, BufReader};
    let (bundle, dir) = (bundle(), folder());
    for (name, status) in [("INT", 130), ("TERM", 143)] {
        let session = format!("--session {}", dir.join(name));
        let mut command = anemoe(format!("chat {bundle} -n 200 {session} --json"));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all("class A:\n".repeat(50).as_bytes()).unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(|line| line.unwrap());
        assert!(lines.any(|line| line.contains("[prompt")), "no answer");
        signal(&child, name);
        let messages: Vec<String> = lines.collect();
        assert_eq!(child.wait().unwrap().code(), Some(status), "{messages:?}");
        let v = talk(&bundle, &format!("-n 2 {session}"), "x\n");
        assert!(list(&v["messages"]).len() >= 4, "{v}");
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
    fn start(bundle: &Place, options: &str, output: Option<fs::File>) -> AtTerminal {
        use std::io::Read;
        let terminal = nix::pty::openpty(None, None).unwrap();
        let own = || Stdio::from(terminal.slave.try_clone().unwrap());
        let mut command = std::process::Command::new("setsid");
        command.args(["--ctty", "--wait", env!("CARGO_BIN_EXE_anemoe"), "chat"]).arg(&**bundle);
        command.args(options.split(' ')).env("TERM", "xterm").stdin(own()).stderr(own());
        let child = command.stdout(output.map_or_else(own, Stdio::from)).spawn().unwrap();
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
        let chat = AtTerminal { child, keys, shown };
        chat.wait_until("> ", |shown| shown.contains("> "));
        chat
    }

    fn wait_until(&self, what: &str, is_there: impl Fn(&str) -> bool) {
        wait_for(what, || is_there(&self.shown.lock().unwrap()));
    }

    /// Waits until a text has been shown `times` times.
    fn wait_for(&self, text: &str, times: usize) {
        self.wait_until(text, |shown| shown.matches(text).count() >= times);
    }

    /// Waits until the next question is asked for behind so many answers: keys before that are typed ahead.
    fn wait_for_question_behind(&self, answers: usize) {
        self.wait_until("question", |shown| {
            shown.match_indices("[prompt").nth(answers - 1).is_some_and(|(at, _)| shown[at..].contains("> "))
        });
    }

    /// Asks a question, and waits until its answer has begun.
    fn ask(&mut self, question: &str) {
        self.press(&format!("{question}\r"));
        // The editor's own output has fewer letters.
        let letters = |behind: &str| behind.matches(char::is_alphabetic).count();
        self.wait_until("answer", |shown| shown.rsplit_once(question).is_some_and(|(_, s)| letters(s) >= 10));
    }

    /// Waits for the end of the chat, which has to be a good one, and returns what was shown.
    fn end(&mut self) -> String {
        let mut status = None;
        wait_for("end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let shown = self.shown.lock().unwrap().clone();
        assert_eq!(status.unwrap().code(), Some(0), "{shown}");
        // The terminal gathers lines and shows typed text, as a shell expects.
        use nix::sys::termios::{LocalFlags, tcgetattr};
        let flags = tcgetattr(&self.keys).unwrap().local_flags;
        assert!(flags.contains(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG));
        shown
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
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
    let bundle = bundle();
    let answering = || {
        let mut chat = AtTerminal::start(&bundle, "-n 150", None);
        chat.ask("def main():");
        chat
    };
    // Ctrl-D during an answer ends the chat after the answer.
    let mut chat = answering();
    chat.press("\u{4}");
    let shown = chat.end();
    assert_eq!(shown.matches("[prompt").count(), 1, "{shown}");
    // Lines and then Ctrl-D during an answer: all lines are answered first.
    let mut chat = answering();
    chat.press("first line\rsecond line\r\u{4}");
    let shown = chat.end();
    assert_eq!(shown.matches("[prompt").count(), 3, "{shown}");
    assert!(shown.contains("> first line") && shown.contains("> second line"), "{shown}");
    // Half a line becomes the beginning of the next question.
    let mut chat = answering();
    chat.press("/st");
    chat.wait_for("[prompt", 1);
    chat.press("ats\r");
    chat.wait_for("1 answer", 1);
    chat.press("\u{4}");
    chat.end();
}

#[cfg(target_os = "linux")]
#[test]
fn a_terminal_takes_lines_in_one_piece_and_keeps_output_apart() {
    let (bundle, file) = (bundle(), folder().join("x.json"));
    let mut chat = AtTerminal::start(&bundle, "-n 4", None);
    chat.press("def main():\r");
    chat.wait_for("[prompt", 1);
    // A line that is typed ahead, before the next question is asked for.
    chat.press("import os\r");
    chat.wait_for_question_behind(2);
    // The arrow key brings the line above again.
    chat.press("\u{1b}[A\r");
    chat.wait_for("[prompt", 3);
    chat.press("/quit\r");
    let shown = chat.end();
    assert!(shown.matches("import os").count() >= 2, "{shown}");

    let mut chat = AtTerminal::start(&bundle, "-n 4 --json", Some(fs::File::create(&file).unwrap()));
    chat.press("def main():\r");
    chat.wait_for("[prompt", 1);
    chat.press("/quit\r");
    chat.end();
    assert_eq!(read_json(&file)["messages"][0]["content"], "def main():");
}
