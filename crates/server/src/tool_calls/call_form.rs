//! The form in which a chat template writes tool calls.

use super::call_grammar::{CallGrammar, terminals};
use super::call_reader::CallMarks;
use super::call_syntax::{CallSyntax, first_tag, tags};
use anemoe_text::chat::{ChatTemplate, message};
use anemoe_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Markers that occur in no other text.
const TOOL: &str = "MARKOFATOOL";
const CALL: &str = "MARKOFACALL";
const TEXT: &str = "*MARKOFATEXT";
/// Key and value of the marker call's only argument.
const ARGUMENT: (&str, &str) = ("key", "value");
/// Tag before calls that Llama 3 writes, but its template does not.
const PYTHON_TAG: &str = "<|python_tag|>";
/// Recipient of gpt-oss's calls; it follows the role or the channel. Models leave out the second half.
const RECIPIENT: (&str, &str) = (" to=", "functions.");
/// Tags before and after calls in any form, which models write whatever their template's form is.
const BEGINS: [&str; 5] = ["<tool_call>", "<|tool_call>", "<|tool_call|>", "[TOOL_CALLS]", PYTHON_TAG];
const ENDS: [&str; 4] = ["</tool_call>", "<tool_call|>", "<|/tool_call|>", "<|call|>"];

/// The form in which a template writes tool calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallForm {
    /// Tags before a call, the usual one first; none where the call is the whole answer.
    pub(super) begins: Vec<String>,
    /// Tag after a call.
    pub(super) end: Option<String>,
    /// Syntax between the tags.
    pub(super) syntax: CallSyntax,
}

impl CallForm {
    /// Finds the form of a template; `None` where it writes no calls, or in an unknown form.
    pub fn of(template: &ChatTemplate) -> Option<CallForm> {
        if !template.takes_tools() {
            return None;
        }
        let parameters = json!({"type": "object", "properties": {ARGUMENT.0: {"type": "string"}}});
        let tool = json!({"name": TOOL, "description": "", "parameters": parameters});
        let tools = [json!({"type": "function", "function": tool})];
        let render =
            |answer: Value| template.render(&[message("user", "x"), answer], Some(&tools), false).ok();
        let call = |arguments: Value| {
            // Mistral's templates ask for ids of nine characters.
            let call = json!({"id": "call00001", "type": "function", "function": {"name": CALL, "arguments": arguments}});
            let mut called =
                Map::from_iter(message("assistant", "").as_object().cloned().unwrap_or_default());
            called.insert("tool_calls".into(), json!([call]));
            render(called.into())
        };
        let arguments = json!({ARGUMENT.0: ARGUMENT.1});
        let whole = call(arguments.clone()).or_else(|| call(arguments.to_string().into()))?;
        // What an answer of text does not have is the call's.
        let text = render(message("assistant", TEXT)).unwrap_or_default();
        let same = text.split(TEXT).next().unwrap_or_default();
        let common = whole.bytes().zip(same.bytes()).take_while(|(a, b)| a == b).count();
        let at = whole.find(CALL)?;
        let start = (0..=common.min(at)).rev().find(|i| whole.is_char_boundary(*i))?;
        CallForm::of_call(&whole[start..at], &whole[at + CALL.len()..])
    }

    /// Finds the form of the marker call by what stands before its name, and behind it.
    fn of_call(before: &str, behind: &str) -> Option<CallForm> {
        if before.strip_suffix(RECIPIENT.1).unwrap_or(before).ends_with(RECIPIENT.0) {
            return Some(CallForm::of_harmony());
        }
        if before.trim_end().ends_with("<function=") {
            let begin = before.trim_end().strip_suffix("<function=")?.trim();
            // Models often leave out the outer tag; the inner one then begins an untagged call.
            let (begin, end) = (first_tag(begin)?, "</tool_call>".to_string());
            return Some(CallForm { begins: vec![begin], end: Some(end), syntax: CallSyntax::Tags });
        }
        if before.trim_end().ends_with('"') {
            return CallForm::of_json(before, behind);
        }
        CallForm::of_braces(before, behind).or_else(|| {
            let (between, rest) = behind.split_once('{')?;
            let mut arguments =
                serde_json::Deserializer::from_str(&behind[between.len()..]).into_iter::<Value>();
            arguments.next()?.ok().filter(|arguments| arguments[ARGUMENT.0] == ARGUMENT.1)?;
            let (begin, between) = (first_tag(before.trim())?, between.to_string());
            let end = rest.split_once('}').and_then(|(_, behind)| mirrored(&begin, behind));
            let is_whole = before.trim() == begin;
            is_whole.then(|| CallForm { begins: vec![begin], end, syntax: CallSyntax::Named { between } })
        })
    }

    /// Returns gpt-oss's form. The model writes the recipient behind the channel, the template before it.
    fn of_harmony() -> CallForm {
        let heads = [
            "<|channel|>commentary",
            "<|start|>assistant<|channel|>commentary",
            "<|start|>assistant",
            "<|channel|>analysis",
        ];
        CallForm {
            begins: [RECIPIENT.1, ""]
                .iter()
                .flat_map(|half| heads.map(|head| format!("{head}{}{half}", RECIPIENT.0)))
                .collect(),
            end: Some("<|call|>".into()),
            syntax: CallSyntax::Named { between: " <|constrain|>json<|message|>".into() },
        }
    }

    /// Finds the JSON object around the marker call.
    fn of_json(before: &str, behind: &str) -> Option<CallForm> {
        let start = before.rfind('{')?;
        let whole = format!("{}{CALL}{behind}", &before[start..]);
        let mut calls = serde_json::Deserializer::from_str(&whole).into_iter::<Map<String, Value>>();
        let call = calls.next()?.ok()?;
        let (before, behind) = (&before[..start], &whole[calls.byte_offset()..]);
        let key = ["arguments", "parameters"]
            .into_iter()
            .find(|key| call.get(*key).is_some_and(|arguments| arguments[ARGUMENT.0] == ARGUMENT.1))?;
        if call.get("name").is_none_or(|name| name != CALL) {
            return None;
        }
        let tagged = before.trim_end_matches(|c: char| c.is_whitespace() || c == '[');
        let Some(begin) = first_tag(tagged.trim()).filter(|tag| tagged.trim() == tag) else {
            // Without tags, only this key distinguishes a call from another object.
            let syntax = CallSyntax::Json { around: Default::default(), key: key.into() };
            return (key == "parameters").then(|| CallForm {
                begins: vec![PYTHON_TAG.into()],
                end: None,
                syntax,
            });
        };
        let tail = behind.trim_start_matches(|c: char| c.is_whitespace() || c == ']');
        let end = mirrored(&begin, tail);
        let close = &behind[..behind.len() - tail.len()];
        let close = if end.is_some() { close } else { close.trim_end() };
        let around = (before[tagged.len()..].to_string(), close.to_string());
        Some(CallForm { begins: vec![begin], end, syntax: CallSyntax::Json { around, key: key.into() } })
    }

    /// Finds the marker call with braces.
    fn of_braces(before: &str, behind: &str) -> Option<CallForm> {
        let begin = first_tag(before.trim_start())?;
        let word = before.trim_start()[begin.len()..].to_string();
        let argument = behind.strip_prefix('{')?.strip_prefix(ARGUMENT.0)?.strip_prefix(':')?;
        let (quote, rest) = argument.split_once(ARGUMENT.1)?;
        let end = first_tag(rest.strip_prefix(quote)?.strip_prefix('}')?);
        let syntax = CallSyntax::Braces { word, quote: quote.into() };
        (!quote.is_empty()).then_some(CallForm { begins: vec![begin], end, syntax })
    }

    /// Returns the tag that ends a call. As a stop string it keeps an answer to a single call.
    pub fn end_tag(&self) -> Option<&str> {
        self.end.as_deref()
    }

    /// Returns what stands around names and texts.
    pub(super) fn marks(&self) -> CallMarks<'_> {
        match &self.syntax {
            CallSyntax::Braces { word, quote } => CallMarks { word, quote },
            _ => CallMarks { word: "call:", quote: "<|\"|>" },
        }
    }

    /// Returns all tags before calls: the form's own, and those of other forms.
    pub(super) fn begins(&self) -> impl Iterator<Item = &str> {
        self.begins.iter().map(String::as_str).chain(BEGINS)
    }

    /// Returns all tags after calls.
    pub(super) fn ends(&self) -> impl Iterator<Item = &str> {
        self.end_tag().into_iter().chain(ENDS)
    }

    /// Returns the special tokens that are part of a call's text, so that decoding must show them.
    pub fn special_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let between = match &self.syntax {
            CallSyntax::Named { between } => between.as_str(),
            _ => "",
        };
        let texts = self.begins().chain(self.ends()).chain([self.marks().quote, between]);
        let mut ids: Vec<u32> = texts.flat_map(tags).filter_map(|tag| tokenizer.special_id(tag)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Makes a grammar in Lark for one call of one of these tools: names, and schemas of arguments.
    pub fn grammar(&self, tools: &[(&str, Value)], tokenizer: &Tokenizer) -> String {
        let begin = match (&self.syntax, self.begins.first()) {
            // The template writes no tag.
            (_, Some(tag)) if tag == PYTHON_TAG => "",
            (_, tag) => tag.map_or("", String::as_str),
        };
        let mark = |text: &str| terminals(text, tokenizer);
        CallGrammar::new(&self.syntax, &mark).write(tools, begin, self.end_tag().unwrap_or_default())
    }
}

/// Returns the tag with which a text begins if it closes the tag `begin`.
fn mirrored(begin: &str, text: &str) -> Option<String> {
    first_tag(text.trim_start()).filter(|end| end.replacen('/', "", 1) == begin)
}
