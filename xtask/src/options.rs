//! Parses the options of a task: `--name VALUE`, flags, and words.

use std::collections::BTreeMap;

/// Options that take no value.
const FLAGS: [&str; 2] = ["keep", "seed-only"];

/// Parsed arguments. A task takes the options that it knows; [`TaskOptions::finish`] refuses the rest.
#[derive(Debug, Default)]
pub struct TaskOptions {
    values: BTreeMap<String, String>,
    words: Vec<String>,
}

impl TaskOptions {
    /// Parses arguments.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<TaskOptions, String> {
        let mut options = TaskOptions::default();
        let mut args = args;
        while let Some(arg) = args.next() {
            let Some(name) = arg.strip_prefix("--") else {
                options.words.push(arg);
                continue;
            };
            let value = if FLAGS.contains(&name) {
                "true".to_string()
            } else {
                args.next().ok_or_else(|| format!("--{name} needs a value"))?
            };
            if options.values.insert(name.to_string(), value).is_some() {
                return Err(format!("--{name} is there twice"));
            }
        }
        Ok(options)
    }

    /// Takes the value of an option.
    pub fn text(&mut self, name: &str) -> Option<String> {
        self.values.remove(name)
    }

    /// Takes the value of an option that must be a number.
    pub fn number(&mut self, name: &str) -> Result<Option<u64>, String> {
        let value = self.text(name);
        value.map(|v| v.parse().map_err(|_| format!("--{name} {v} is not a number"))).transpose()
    }

    /// Tells whether a flag was given.
    pub fn flag(&mut self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// Returns the words. Refuses options that the task did not take.
    pub fn finish(self) -> Result<Vec<String>, String> {
        match self.values.keys().next() {
            Some(name) => Err(format!("--{name}: no such option of this task")),
            None => Ok(self.words),
        }
    }
}
