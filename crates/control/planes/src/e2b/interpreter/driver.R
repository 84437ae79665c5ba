# Evaluates R code as its prompt does. Arguments: this text, the code, the path of the result.
# The result is a V and the printed value of the last expression, if that is visible, or an E and a message.
local({
    given <- commandArgs(TRUE)
    leave <- function(kind, lines) cat(kind, paste(lines, collapse = "\n"), "\n", sep = "", file = given[3])
    tryCatch({
        parts <- parse(text = given[2], keep.source = FALSE)
        for (at in seq_along(parts)) {
            found <- withVisible(eval(parts[[at]], globalenv()))
            if (!found$visible) next
            if (at < length(parts)) print(found$value) else leave("V", capture.output(print(found$value)))
        }
    }, error = function(error) {
        message(conditionMessage(error))
        leave("E", conditionMessage(error))
        quit(status = 1)
    })
})
