//! Splits the thoughts of a model from the text of its answer.
//!
//! ```text
//! <think> THOUGHTS </think> text                                                            Qwen, DeepSeek; at the beginning
//! <|channel>thought\n THOUGHTS <channel|> text                                              Gemma 4; anywhere
//! <|channel|>analysis<|message|> THOUGHTS <|end|><|start|>assistant<|channel|>final<|message|> text     gpt-oss ("harmony")
//! ```
//! The beginning of an answer may open thoughts: templates of models that always think write the mark themselves.

/// Tags around thoughts.
const TAGS: [(&str, &str); 2] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];
const CHANNEL: &str = "<|channel>";
const CHANNEL_END: &str = "<channel|>";
const HARMONY: &str = "<|channel|>";
const START: &str = "<|start|>";
const BODY: &str = "<|message|>";
const CALL: &str = "<|call|>";
/// Marks that may begin or end thoughts.
const MARKS: [&str; 12] = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    CHANNEL,
    CHANNEL_END,
    HARMONY,
    START,
    BODY,
    "<|end|>",
    "<|return|>",
    CALL,
];
/// Mark inside the header of a call of harmony.
const CONSTRAIN: &str = "<|constrain|>";
/// Longest first line of a channel that is its name, in bytes.
const MAX_NAME: usize = 32;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPiece {
    /// Text for the user.
    Text(String),
    /// Thoughts before it.
    Thought(String),
}

/// Place in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerPlace {
    /// Nothing but blanks so far.
    Begin,
    /// Text for the user.
    Text,
    /// Thoughts.
    Thought,
    /// First line of a channel of Gemma 4: its name.
    ChannelName,
    /// Role and channel of a message of harmony.
    Header,
    /// A call of harmony, which stays text as it is written.
    Call,
}

/// Splits an answer that arrives in pieces. Holds back text that may begin a mark, and blanks at the ends of thoughts.
#[derive(Clone, Debug)]
pub struct ThoughtSplitter {
    place: AnswerPlace,
    is_harmony: bool,
    /// Text that may begin a mark.
    held: String,
    /// Name or header so far.
    header: String,
    /// Receiver of a call, from the role of its message.
    receiver: String,
    /// Blanks that count only if text follows.
    blanks: String,
    /// True if blanks at the beginning of this place are left out.
    is_fresh: bool,
    /// True if the answer had tags around thoughts: later ones count, too.
    has_tags: bool,
    /// True if there were thoughts already, from which later ones are parted by a line end.
    has_thoughts: bool,
}

impl ThoughtSplitter {
    /// Makes a splitter of an answer that the template begins with `beginning`, the end of the prompt.
    pub fn new(beginning: &str) -> ThoughtSplitter {
        let (held, header, receiver, blanks) = Default::default();
        let mut splitter = ThoughtSplitter {
            place: AnswerPlace::Begin,
            is_harmony: false,
            held,
            header,
            receiver,
            blanks,
            is_fresh: true,
            has_tags: false,
            has_thoughts: false,
        };
        let opens = |mark: &str| beginning.rfind(mark).map(|at| at + mark.len());
        let unclosed =
            |open: &str, close: &str| opens(open).is_some_and(|at| !beginning[at..].contains(close));
        splitter.has_tags = TAGS.iter().any(|(open, close)| unclosed(open, close));
        splitter.is_harmony = beginning.contains(START);
        splitter.place = match () {
            () if splitter.has_tags || unclosed(CHANNEL, CHANNEL_END) => AnswerPlace::Thought,
            () if beginning.trim_end().ends_with("<|channel|>analysis<|message|>") => AnswerPlace::Thought,
            () if beginning.trim_end().ends_with(BODY) => AnswerPlace::Text,
            () if splitter.is_harmony && !beginning[opens(START).unwrap_or(0)..].contains('\n') => {
                AnswerPlace::Header
            }
            () => AnswerPlace::Begin,
        };
        splitter
    }

    /// Tells whether a prompt may open thoughts, or be of a form that names what follows.
    pub fn may_begin_in(prompt: &str) -> bool {
        TAGS.iter().map(|(open, _)| *open).chain([CHANNEL, START]).any(|mark| prompt.contains(mark))
    }

    /// Returns the tag at the end of a prompt that opens thoughts.
    pub fn opened_by(prompt: &str) -> Option<&'static str> {
        TAGS.into_iter().map(|(open, _)| open).find(|open| prompt.trim_end().ends_with(open))
    }

    /// Returns the text that brings an answer to where its text begins, for answers that have to follow a grammar.
    pub fn way_to_text(&self) -> &'static str {
        match (self.place, self.is_harmony) {
            (AnswerPlace::Thought, true) => "<|end|><|start|>assistant<|channel|>final<|message|>",
            (AnswerPlace::Header, _) => "<|channel|>final<|message|>",
            (AnswerPlace::Thought, _) if self.has_tags => "\n</think>\n\n",
            (AnswerPlace::Thought, _) => CHANNEL_END,
            _ => "",
        }
    }

    /// Returns the names of the special tokens that have to be text of an answer, for the marks to be seen.
    pub fn marks() -> impl Iterator<Item = &'static str> {
        MARKS.into_iter().chain([CONSTRAIN])
    }

    /// Tells whether the newest text belongs to thoughts.
    pub fn is_thinking(&self) -> bool {
        matches!(self.place, AnswerPlace::Thought | AnswerPlace::ChannelName)
    }

    /// Adds text of the answer. Returns the pieces that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_str();
        while let Some(at) = rest.find(['<', '[']) {
            self.add(&rest[..at], &mut pieces);
            rest = &rest[at..];
            if let Some(mark) = MARKS.into_iter().find(|mark| rest.starts_with(mark)) {
                if !self.pass(mark, &mut pieces) {
                    self.add(mark, &mut pieces);
                }
                rest = &rest[mark.len()..];
            } else if MARKS.into_iter().any(|mark| mark.starts_with(rest)) {
                self.held = rest.to_string();
                return pieces;
            } else {
                self.add(&rest[..1], &mut pieces);
                rest = &rest[1..];
            }
        }
        self.add(rest, &mut pieces);
        pieces
    }

    /// Returns the pieces that were held back, when the answer has ended.
    pub fn finish(&mut self) -> Vec<AnswerPiece> {
        let mut pieces = Vec::new();
        let held = std::mem::take(&mut self.held);
        self.add(&held, &mut pieces);
        if self.place == AnswerPlace::Begin {
            put(&mut pieces, AnswerPiece::Text, &std::mem::take(&mut self.blanks));
        }
        pieces
    }

    /// Goes past a mark; returns false where it is text.
    fn pass(&mut self, mark: &'static str, pieces: &mut Vec<AnswerPiece>) -> bool {
        let is_between = self.is_harmony || self.place == AnswerPlace::Begin;
        let next = match (self.place, mark) {
            (AnswerPlace::Begin, "<think>" | "[THINK]") => AnswerPlace::Thought,
            (AnswerPlace::Text, "<think>" | "[THINK]") if self.has_tags => AnswerPlace::Thought,
            (AnswerPlace::Thought, "</think>" | "[/THINK]" | CHANNEL_END) if !self.is_harmony => {
                AnswerPlace::Text
            }
            (AnswerPlace::ChannelName, CHANNEL_END) => AnswerPlace::Text,
            (AnswerPlace::Begin | AnswerPlace::Text, CHANNEL) => AnswerPlace::ChannelName,
            (AnswerPlace::Header, BODY) => self.place_behind_header(pieces),
            (_, HARMONY) if is_between => {
                let role = std::mem::take(&mut self.header);
                self.receiver = role.find("to=").map(|at| role[at..].to_string()).unwrap_or_default();
                self.is_harmony = true;
                AnswerPlace::Header
            }
            (_, START | "<|end|>" | "<|return|>" | CALL)
                if is_between && (self.is_harmony || mark == START) =>
            {
                if (self.place, mark) == (AnswerPlace::Call, CALL) {
                    put(pieces, AnswerPiece::Text, CALL);
                }
                self.is_harmony = true;
                AnswerPlace::Header
            }
            _ => return false,
        };
        self.has_tags |= TAGS.iter().any(|(open, _)| *open == mark);
        self.header.clear();
        self.enter(next);
        true
    }

    fn enter(&mut self, place: AnswerPlace) {
        self.place = place;
        self.is_fresh = true;
        self.blanks.clear();
        if place == AnswerPlace::Thought && self.has_thoughts {
            self.blanks.push('\n');
        }
    }

    /// Returns the place that the header of harmony names; begins a call, if it is one.
    fn place_behind_header(&mut self, pieces: &mut Vec<AnswerPiece>) -> AnswerPlace {
        let header = format!("{} {}", self.header.trim(), std::mem::take(&mut self.receiver));
        match header.trim_start() {
            call if call.contains("to=") => {
                let to = call.split_whitespace().find(|word| word.starts_with("to=")).unwrap_or_default();
                put(pieces, AnswerPiece::Text, &format!("{HARMONY}commentary {to}{BODY}"));
                AnswerPlace::Call
            }
            header if header.starts_with("analysis") => AnswerPlace::Thought,
            _ => AnswerPlace::Text,
        }
    }

    /// Adds text that is no mark.
    fn add(&mut self, text: &str, pieces: &mut Vec<AnswerPiece>) {
        match self.place {
            AnswerPlace::Header => self.header.push_str(text),
            AnswerPlace::ChannelName => {
                self.header.push_str(text);
                let line = self.header.find('\n');
                if line.is_some() || self.header.len() > MAX_NAME {
                    let header = std::mem::take(&mut self.header);
                    let is_name = line.is_some_and(|at| at <= MAX_NAME && !header[..at].trim().contains(' '));
                    self.enter(AnswerPlace::Thought);
                    self.add(&header[line.filter(|_| is_name).map_or(0, |at| at + 1)..], pieces);
                }
            }
            AnswerPlace::Begin if text.trim().is_empty() => self.blanks.push_str(text),
            AnswerPlace::Begin => {
                self.place = AnswerPlace::Text;
                put(pieces, AnswerPiece::Text, &(std::mem::take(&mut self.blanks) + text));
                self.is_fresh = false;
            }
            AnswerPlace::Call => put(pieces, AnswerPiece::Text, text),
            AnswerPlace::Text | AnswerPlace::Thought => {
                let text = if self.is_fresh { text.trim_start() } else { text };
                self.is_fresh &= text.is_empty();
                if self.place == AnswerPlace::Text {
                    return put(pieces, AnswerPiece::Text, text);
                }
                let end = text.trim_end().len();
                if end > 0 {
                    let blanks = std::mem::take(&mut self.blanks);
                    self.has_thoughts = true;
                    put(pieces, AnswerPiece::Thought, &(blanks + &text[..end]));
                }
                self.blanks.push_str(&text[end..]);
            }
        }
    }
}

/// Adds text to the pieces: to the last of them, if that is of the same kind.
fn put(pieces: &mut Vec<AnswerPiece>, kind: fn(String) -> AnswerPiece, text: &str) {
    use AnswerPiece::{Text, Thought};
    if text.is_empty() {
        return;
    }
    match (pieces.last_mut(), kind(String::new())) {
        (Some(Text(last)), Text(_)) | (Some(Thought(last)), Thought(_)) => last.push_str(text),
        _ => pieces.push(kind(text.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns thoughts and text of an answer, for every way to cut it in three pieces.
    fn split(prompt: &str, answer: &str) -> (String, String) {
        let places: Vec<usize> = answer.char_indices().map(|(i, _)| i).chain([answer.len()]).collect();
        let mut whole = None;
        for &a in &places {
            for &b in places.iter().filter(|b| **b >= a) {
                let mut splitter = ThoughtSplitter::new(prompt);
                let cut = [&answer[..a], &answer[a..b], &answer[b..]];
                let mut pieces: Vec<AnswerPiece> =
                    cut.iter().flat_map(|piece| splitter.push(piece)).collect();
                pieces.extend(splitter.finish());
                let (mut thoughts, mut text) = (String::new(), String::new());
                for piece in pieces {
                    match piece {
                        AnswerPiece::Thought(piece) => thoughts += &piece,
                        AnswerPiece::Text(piece) => text += &piece,
                    }
                }
                assert_eq!(
                    *whole.get_or_insert((thoughts.clone(), text.clone())),
                    (thoughts, text),
                    "{cut:?}"
                );
            }
        }
        whole.unwrap_or_default()
    }

    #[test]
    fn thoughts_are_split_wherever_pieces_are_cut() {
        for (prompt, answer, thoughts, text) in [
            ("", "<think>\nso\n\nand\n</think>\n\nFour.\n", "so\n\nand", "Four.\n"),
            ("x<think>\n", "so</think>Four", "so", "Four"),
            ("", "<think>\n\n</think>\n\nFour.", "", "Four."),
            ("", "[THINK]so[/THINK]Four.", "so", "Four."),
            ("", "<|channel>thought\nso\n<channel|>Four.", "so", "Four."),
            ("<|channel>thought\n", "so<channel|>Four.", "so", "Four."),
            ("", "A <|channel>thought\nso<channel|>B <|channel>thought\nit<channel|>C", "so\nit", "A B C"),
            ("", "<think>so</think><think>it</think>A", "so\nit", "A"),
            ("<|turn>model\n<think>\ntrigger", "so</think>A", "so", "A"),
            ("<think></think>", "A", "", "A"),
            (
                "",
                "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
                "so",
                "Four.",
            ),
            (
                "<|start|>assistant",
                "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>4",
                "so",
                "4",
            ),
            (
                "<|start|>assistant",
                "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
                "",
                "<|channel|>commentary to=functions.f<|message|>{\"a\": 1}<|call|>",
            ),
            (
                "<|start|>assistant",
                " to=functions.f<|channel|>commentary json<|message|>{}",
                "",
                "<|channel|>commentary to=functions.f<|message|>{}",
            ),
            (
                "",
                "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
                "",
                "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
            ),
            // An answer that ends inside thoughts.
            ("", "<think>so it", "so it", ""),
            ("", "<|channel>thought\nso <ch", "so <ch", ""),
            // What only looks like it.
            ("", "Write <think> and </think>, a < b, [1].", "", "Write <think> and </think>, a < b, [1]."),
            ("", "</think> <|message|> <|end|>", "", "</think> <|message|> <|end|>"),
            ("", " \n", "", " \n"),
            ("", "<thin", "", "<thin"),
            ("", "", "", ""),
        ] {
            assert_eq!(split(prompt, answer), (thoughts.into(), text.into()), "{prompt:?} {answer:?}");
        }
    }

    #[test]
    fn an_open_thought_can_be_closed() {
        for (beginning, way) in [
            ("<think>\n", "\n</think>\n\n"),
            ("<|channel>thought\n", "<channel|>"),
            ("<|start|>assistant", "<|channel|>final<|message|>"),
            ("<|im_start|>assistant\n", ""),
        ] {
            let splitter = ThoughtSplitter::new(beginning);
            assert_eq!(splitter.way_to_text(), way);
            assert!(!ThoughtSplitter::new(&format!("{beginning}{way}")).is_thinking());
        }
    }

    #[test]
    fn plain_text_is_not_held_back() {
        let mut splitter = ThoughtSplitter::new("");
        assert_eq!(splitter.push("So \n"), [AnswerPiece::Text("So \n".into())]);
        assert_eq!(splitter.push("a <"), [AnswerPiece::Text("a ".into())]);
        assert_eq!(splitter.push("b"), [AnswerPiece::Text("<b".into())]);
    }
}
