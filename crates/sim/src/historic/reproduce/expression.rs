//! Expressions over figures: `vmtest@32.kernel_ns / vmtest@32.translation_fault_count / 1000`.
//!
//! Numbers, the four operations, parentheses, `RUN.FIGURE`, and `rms(SWEEP, COLUMN, FROM, TO)`: the
//! geometric root mean square of a sweep's ratios to the published values, as a factor of at least 1.

use super::figure::Figure;
use pagetax_core::expression::{Cursor, Language, expect, parse};

/// A parsed expression.
#[derive(Debug, Clone, PartialEq)]
pub enum Expression {
    /// A constant number.
    Number(f64),
    /// A figure of a run.
    Term {
        /// The name of the run, as the file has it.
        run: String,
        /// The figure to take from that run.
        figure: Figure,
    },
    /// The root mean square of a sweep's rows.
    Rms {
        /// The name of the sweep over a table.
        sweep: String,
        /// The column of the published table.
        column: String,
        /// The first key that counts.
        from: f64,
        /// The last key that counts.
        to: f64,
    },
    /// Two operands and one of `+ - * /`.
    Binary(Box<Expression>, char, Box<Expression>),
}

/// The source of an expression's numbers.
pub trait Values {
    /// Returns a figure of a run, for the present seed.
    fn term(&self, run: &str, figure: &Figure) -> f64;

    /// Returns the root mean square of a sweep's rows.
    fn rms(&self, sweep: &str, column: &str, from: f64, to: f64) -> f64;
}

impl Expression {
    /// Parses the text of an expression.
    ///
    /// # Errors
    /// Names the text that does not fit, and the tokens that would.
    pub fn parse(text: &str) -> Result<Expression, String> {
        parse(text, &mut FigureLanguage)
    }

    /// Returns every figure of a run in it.
    pub fn terms(&self) -> Vec<(&str, &Figure)> {
        match self {
            Expression::Number(_) | Expression::Rms { .. } => Vec::new(),
            Expression::Term { run, figure } => vec![(run, figure)],
            Expression::Binary(left, _, right) => [left.terms(), right.terms()].concat(),
        }
    }

    /// Replaces `row` by this run, and `row.key` by this number.
    pub fn for_row(self, run: &str, key: f64) -> Expression {
        match self {
            Expression::Term { run: row, figure } if row == "row" => match figure.name.as_str() {
                "key" => Expression::Number(key),
                _ => Expression::Term { run: run.into(), figure },
            },
            Expression::Binary(left, operator, right) => Expression::Binary(
                Box::new(left.for_row(run, key)),
                operator,
                Box::new(right.for_row(run, key)),
            ),
            other => other,
        }
    }

    /// Returns the value of the expression.
    pub fn value(&self, values: &impl Values) -> f64 {
        match self {
            Expression::Number(number) => *number,
            Expression::Term { run, figure } => values.term(run, figure),
            Expression::Rms { sweep, column, from, to } => values.rms(sweep, column, *from, *to),
            Expression::Binary(left, operator, right) => {
                let (left, right) = (left.value(values), right.value(values));
                match operator {
                    '+' => left + right,
                    '-' => left - right,
                    '*' => left * right,
                    _ => left / right,
                }
            }
        }
    }
}

/// The language of figures.
struct FigureLanguage;

impl Language for FigureLanguage {
    type Value = Expression;
    type Error = String;

    fn unexpected(&self, rest: &str, expected: &'static str) -> String {
        format!("`{rest}` stands where {expected} should")
    }

    fn combine(
        &mut self,
        left: Expression,
        operator: char,
        right: Expression,
    ) -> Result<Expression, String> {
        Ok(Expression::Binary(Box::new(left), operator, Box::new(right)))
    }

    fn atom(&mut self, cursor: &mut Cursor<'_>) -> Result<Expression, String> {
        let rest = cursor.rest();
        if rest.starts_with(|c: char| c.is_ascii_digit()) {
            let text = cursor.take_while(|c| c.is_ascii_digit() || c == '.' || c == '_');
            let number = text.replace('_', "").parse();
            return number.map(Expression::Number).map_err(|_| format!("`{text}` is no number"));
        }
        let run = cursor.take_while(|c| c.is_ascii_alphanumeric() || c == '_' || c == '@');
        match run {
            "" => Err(self.unexpected(rest, "a number or RUN.FIGURE")),
            "rms" => self.rms(cursor),
            run => {
                expect(cursor, self, ".", "`.`")?;
                let name = cursor.take_while(|c| c.is_ascii_alphanumeric() || c == '_').to_string();
                let figure = Figure { name, args: self.args(cursor)? };
                Ok(Expression::Term { run: run.into(), figure })
            }
        }
    }
}

impl FigureLanguage {
    fn args(&self, cursor: &mut Cursor<'_>) -> Result<Vec<String>, String> {
        let mut args = Vec::new();
        if cursor.eat("(") {
            loop {
                args.push(cursor.take_while(|c| c != ',' && c != ')').to_string());
                if !cursor.eat(",") {
                    break;
                }
            }
            expect(cursor, self, ")", "`)`")?;
        }
        Ok(args)
    }

    fn rms(&self, cursor: &mut Cursor<'_>) -> Result<Expression, String> {
        let args = self.args(cursor)?;
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no number"));
        match args.as_slice() {
            [sweep, column, from, to] => Ok(Expression::Rms {
                sweep: sweep.clone(),
                column: column.clone(),
                from: number(from)?,
                to: number(to)?,
            }),
            _ => Err("rms takes a sweep, a column, and keys from and to".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named;

    impl Values for Named {
        fn term(&self, run: &str, figure: &Figure) -> f64 {
            run.len() as f64 + 10.0 * figure.args.len() as f64
        }

        fn rms(&self, _: &str, _: &str, from: f64, to: f64) -> f64 {
            to - from
        }
    }

    #[test]
    fn the_four_operations_bind_as_usual() {
        let value = |text: &str| Expression::parse(text).unwrap().value(&Named);
        assert_eq!(value("1 + 2 * 3 - 8 / (2 + 2)"), 5.0);
        assert_eq!(value("ab@2.wall_s / 2"), 2.0);
        assert_eq!(value("a.rate(page_in_count, verify, 1, 11) + 1_000"), 1041.0);
        assert_eq!(value("rms(vmtest, elapsed_s, 18, 32)"), 14.0);
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| Expression::parse(text).unwrap_err();
        assert!(error("1 +").contains("number or RUN.FIGURE"));
        assert!(error("a").contains("`.`"));
        assert!(error("a.b(c").contains("`)`"));
        assert!(error("1 2").contains("operator"));
        assert!(error("rms(a, b)").contains("sweep"));
    }
}
