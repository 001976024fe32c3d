//! The one parser of arithmetic: sums, products and parentheses over the atoms of a [`Language`].
//!
//! Quantities of jobs and figures of published tables are two languages with the same grammar:
//!
//! ```text
//! sum     = product (("+" | "-") product)*
//! product = factor (("*" | "/") factor)*
//! factor  = "(" sum ")" | atom
//! ```

/// The rest of a text that is being parsed. It never begins with white space.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    /// Returns the text that is not parsed yet.
    pub fn rest(&self) -> &'a str {
        self.rest
    }

    /// Takes a token if the rest begins with it, and the white space after it.
    pub fn eat(&mut self, token: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(token) else { return false };
        self.rest = rest.trim_start();
        true
    }

    /// Takes the characters up to the first that `keep` refuses, without white space at their end.
    pub fn take_while(&mut self, keep: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !keep(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        taken.trim_end()
    }
}

/// The atoms of expressions, and the values that operations make of them.
pub trait Language {
    /// An operand or result: a number, or a part of a syntax tree.
    type Value;
    /// The error of a text that is no expression.
    type Error;

    /// Parses an operand that is not in parentheses.
    fn atom(&mut self, cursor: &mut Cursor<'_>) -> Result<Self::Value, Self::Error>;

    /// Applies one of `+ - * /`.
    fn combine(
        &mut self,
        left: Self::Value,
        operator: char,
        right: Self::Value,
    ) -> Result<Self::Value, Self::Error>;

    /// Returns the error of a rest that does not begin with what is expected.
    fn unexpected(&self, rest: &str, expected: &'static str) -> Self::Error;

    /// Begins a factor. An error stops texts that are nested too deeply.
    fn enter(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Ends a factor that [`Language::enter`] began.
    fn leave(&mut self) {}
}

/// Parses a text as one whole expression.
///
/// # Errors
/// The language's error for the first place that does not fit.
pub fn parse<L: Language>(text: &str, language: &mut L) -> Result<L::Value, L::Error> {
    let mut cursor = Cursor { rest: text.trim_start() };
    let value = sum(&mut cursor, language)?;
    match cursor.rest {
        "" => Ok(value),
        rest => Err(language.unexpected(rest, "an operator or the end")),
    }
}

/// Parses a sum, for functions whose arguments are expressions.
///
/// # Errors
/// As of [`parse`].
pub fn sum<L: Language>(cursor: &mut Cursor<'_>, language: &mut L) -> Result<L::Value, L::Error> {
    operations(cursor, language, [("+", '+'), ("-", '-')], |cursor, language| {
        operations(cursor, language, [("*", '*'), ("/", '/')], factor)
    })
}

/// Takes a token that must be next; `name` is its name in errors.
///
/// # Errors
/// If the rest begins with something else.
pub fn expect<L: Language>(
    cursor: &mut Cursor<'_>,
    language: &L,
    token: &str,
    name: &'static str,
) -> Result<(), L::Error> {
    if cursor.eat(token) { Ok(()) } else { Err(language.unexpected(cursor.rest, name)) }
}

fn operations<L: Language>(
    cursor: &mut Cursor<'_>,
    language: &mut L,
    operators: [(&str, char); 2],
    operand: impl Fn(&mut Cursor<'_>, &mut L) -> Result<L::Value, L::Error>,
) -> Result<L::Value, L::Error> {
    let mut left = operand(cursor, language)?;
    while let Some((_, operator)) = operators.iter().find(|(token, _)| cursor.eat(token)) {
        let right = operand(cursor, language)?;
        left = language.combine(left, *operator, right)?;
    }
    Ok(left)
}

fn factor<L: Language>(cursor: &mut Cursor<'_>, language: &mut L) -> Result<L::Value, L::Error> {
    language.enter()?;
    let value = if cursor.eat("(") {
        let value = sum(cursor, language)?;
        expect(cursor, language, ")", "`)`")?;
        value
    } else {
        language.atom(cursor)?
    };
    language.leave();
    Ok(value)
}
