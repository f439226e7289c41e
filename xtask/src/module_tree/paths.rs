//! Finds which items of other files a file uses.

use super::tree::{Crate, Module, Resolved, is_for_tests};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// A use of an item by another file of the crate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ItemUse {
    /// Index of the file that uses the item.
    pub from: usize,
    /// Index of the file that declares the item.
    pub to: usize,
    /// Name of the item.
    pub item: String,
}

/// Finds all uses between files. A re-export is no use: users of the re-exported name use the file that declares the item.
pub fn find_references(read: &Crate) -> Vec<ItemUse> {
    let mut found = Vec::new();
    for (index, module) in read.modules.iter().enumerate() {
        let mut walk = PathWalk { paths: module.private_imports.clone(), scopes: Module::default() };
        for item in &module.items {
            walk.visit_item(item);
        }
        let PathWalk { paths, scopes } = walk;
        for path in paths.iter().chain(&scopes.private_imports) {
            // Imports inside a function take precedence over those of its module.
            let full: Vec<String> = match path.first().and_then(|first| scopes.imports.get(first)) {
                Some(import) if import != path => import.iter().chain(&path[1..]).cloned().collect(),
                _ => path.clone(),
            };
            let to = match read.resolve(index, &full) {
                Some(Resolved::Item(file, item)) => Some((file, item)),
                _ => macro_name(&full).and_then(|name| Some((*read.macros.get(name)?, format!("{name}!")))),
            };
            if let Some((to, item)) = to.filter(|(to, _)| *to != module.file) {
                found.push(ItemUse { from: module.file, to, item });
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Returns the name of a called macro, which the walk records as `name!`.
fn macro_name(path: &[String]) -> Option<&str> {
    path.last()?.strip_suffix('!')
}

struct PathWalk {
    paths: Vec<Vec<String>>,
    /// Imports inside functions.
    scopes: Module,
}

impl PathWalk {
    /// Collects paths from the tokens of a macro call, whose grammar is not known.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is =
            |at: Option<&TokenTree>, c: char| matches!(at, Some(TokenTree::Punct(p)) if p.as_char() == c);
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(ident) if !(at > 0 && is(tokens.get(at - 1), '.')) => {
                    let mut path = vec![ident.to_string()];
                    while is(tokens.get(at + 1), ':') && is(tokens.get(at + 2), ':') {
                        let Some(TokenTree::Ident(next)) = tokens.get(at + 3) else { break };
                        path.push(next.to_string());
                        at += 3;
                    }
                    let called = matches!(tokens.get(at + 1), Some(TokenTree::Group(g))
                        if g.delimiter() == proc_macro2::Delimiter::Parenthesis);
                    self.value(path, called);
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Records a path in an expression. A single lower-case name that is not called counts as a variable.
    fn value(&mut self, path: Vec<String>, called: bool) {
        let upper = path[0].chars().next().is_some_and(char::is_uppercase);
        if path.len() > 1 || upper || called {
            self.paths.push(path);
        }
    }
}

fn names(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|s| s.ident.to_string()).collect()
}

impl<'ast> Visit<'ast> for PathWalk {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes: &[syn::Attribute] = match item {
            syn::Item::Impl(i) => &i.attrs,
            syn::Item::Macro(i) => &i.attrs,
            syn::Item::Fn(i) => &i.attrs,
            _ => &[],
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.scopes.import(&item.tree, &mut Vec::new(), true);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(path) = &*call.func {
            self.value(names(&path.path), true);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        self.value(names(&path.path), false);
        // Visits generic arguments, and the type of `<T as Trait>::f`.
        visit::visit_expr_path(self, path);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.value(names(path), false);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let mut path = names(&call.path);
        if let [name] = &mut path[..] {
            name.push('!');
        }
        self.paths.push(path);
        self.tokens(call.tokens.clone());
    }
}
